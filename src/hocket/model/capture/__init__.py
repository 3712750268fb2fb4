"""Find a model's work: by torch.export, by its children, or by its submodules.

Imports `model.trace`. Begin with `capture.py`; `captured.py` is what comes out.
"""
