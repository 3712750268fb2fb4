"""Measures or counts what each layer costs: seconds, bytes, FLOPs.

Imports the other rooms of `model`. Begin with `measure.py`; `profile.py` has the
result, which is kept as JSON.
"""
