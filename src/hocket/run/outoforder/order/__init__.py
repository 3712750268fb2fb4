"""Measures a step's regions, tries orders of them, and keeps the fastest.

Imports `capture`, `play` and `passes`. Begin with `choose.py`.
"""
