"""Inference with another net in a pipeline's bubbles (PipeFill).

`settings.py` is the user's argument, `filling.py` runs it on one worker, and `make.py`
measures the net and decides how many forwards go where. Imports `engine` and what is
before it. Begin with `settings.py`.
"""
