"""Change an order: each file is one function from Schedule to Schedule.

Imports `core` only. Begin with `split_backward.py`.
"""
