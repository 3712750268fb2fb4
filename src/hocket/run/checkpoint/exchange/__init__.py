"""Weights in other programs' files: safetensors, torch files, DCP. No code is run.

Begin with `export.py` and `imports.py`. Imports `run.checkpoint` and what is before it.
"""
