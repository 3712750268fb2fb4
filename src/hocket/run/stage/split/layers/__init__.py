"""Layers whose weight gradient waits for W: their operators and formulas.

`call.py` is one call of such a layer; `linear.py` and the like have the formulas;
`pending.py` holds what waits. Imports `run.stage` and what is before it. Begin with
`call.py`.
"""
