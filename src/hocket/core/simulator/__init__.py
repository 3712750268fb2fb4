"""Predict times and bytes for `simulate`; a schedule passes through these files.

columns ──▶ needs ─────▶ work ──▶ clocks ──▶ memory
ops as      what each    plain    in order,  bytes over
numbers     op needs,    lists    or events  time
            and messages

Imports the other files of `core`. Begin with `columns.py`.
"""
