"""Cut a captured model into stages: modules that keep the uncut model's names.

Imports `model.capture` and `model.trace`. Begin with `cut.py`; `stage.py` is what comes
out.
"""
