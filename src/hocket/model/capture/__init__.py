"""Captures a model's graph: by torch.export, by its children, or by its submodules.

Imports `model.trace`. Begin with `capture.py`; `captured.py` has the result.
"""
