"""Predict times and bytes for `simulate`; a schedule passes through these files.

columns ──▶ values ──▶ messages ──▶ work ──▶ in_order  ──▶ memory
ops as      what each  what goes    plain    or events     bytes over
numbers     op needs   where        lists    (the clock)   time

Imports the other files of `core`. Begin with `columns.py`.
"""
