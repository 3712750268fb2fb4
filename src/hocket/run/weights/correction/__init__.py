"""Corrections for stale gradients, applied to the updates of delayed stages.

Imports `planner` and what `run.weights` may. Begin with `correction.py`, the interface.
"""
