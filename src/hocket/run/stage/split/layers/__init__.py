"""Layers whose weight gradient waits for W: their operators and formulas.

`call.py` is one call of such a layer, and holds what waits; `convolution.py` has the
longest formula. Imports `run.stage` and what is before it. Begin with `call.py`.
"""
