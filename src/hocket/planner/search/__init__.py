"""Searches the best order for a program, and bounds how far any other is from it.

problem ──▶ bound        no order is faster; no package needed
   └──────▶ model        OR-tools' CP-SAT: orders that are faster, and bounds that are
                         higher, until they meet: optimum

Imports `core` and `passes`. Begin with `optimum.py`.
"""
