"""Schedules as text and as PyTorch's CSV, written and read.

Imports `core`. Begin with `text.py`.
"""
