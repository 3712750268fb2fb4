"""Predict times and bytes for `simulate`; a schedule passes through these files.

columns ──▶ needs ───▶ messages ──▶ work ──▶ clocks ──▶ memory
ops as      what each  what goes    plain    in order,  bytes over
numbers     op needs   where        lists    or events  time

Imports the other files of `core`. Begin with `columns.py`.
"""
