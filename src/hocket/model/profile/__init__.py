"""Measure or count what each layer costs: seconds, bytes, FLOPs.

Imports the other rooms of `model`. Begin with `measure.py`; `profile.py` is what comes
out and is kept as JSON.
"""
