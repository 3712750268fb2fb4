"""Weights to and from other programs: safetensors, torch files, DCP; no code is run.

Begin with `export.py` and `imports.py`. Imports `run.checkpoint` and what is before it.
"""
