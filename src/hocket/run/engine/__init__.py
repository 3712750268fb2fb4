"""Plays a device's lanes: receive, compute, send, in the schedule's order.

`worker.py` plays one lane; `executor.py` holds what it works with; `point_to_point.py`
moves messages; `results.py` broadcasts losses; `emulate.py` is the oracle.
Imports `run.weights` and what is before it. Begin with `worker.py`.
"""
