"""Inference with another net in a pipeline's bubbles (PipeFill).

`settings.py` is the user's argument, and `make.py` measures the net, decides how many
forwards go where, and runs them on one worker. Imports `engine` and what is before it.
Begin with `settings.py`.
"""
