"""Updates weights: reduces, checks and clips gradients, and steps optimizers.

`updater.py` is the optimizer's step of one stage; `reduce.py` sums over replicas;
`gradients.py` finds norms over all workers; `tied_weights.py` and `stale_ties/` keep
shared weights equal.
Imports `run.stage` and what is before it. Begin with `updater.py`.
"""
