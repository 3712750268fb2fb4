"""Layers that freeze while training runs, and workers that change their layout.

Imports every room of `run` before it. Begin with `freezing.py`, which decides;
`reshape.py` cuts the net again and moves its state, and `refusals.py` says what does
not go together with it.
"""
