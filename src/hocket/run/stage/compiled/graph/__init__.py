"""Graphs of operators, and how they are rewritten before they are compiled.

Imports torch and nothing of `run`. Begin with `graphs.py`.
"""
