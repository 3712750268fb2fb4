"""What changes weights: gradients summed, judged and clipped; updates; old versions.

`updater.py` is the optimizer's step of one stage; `reduce.py` sums over replicas;
`gradients.py` finds norms over all workers; `tied_weights.py` and `stale_ties/` keep
shared weights equal; `correction/` acts on the age of gradients.
Imports `run.stage` and what is before it. Begin with `updater.py`.
"""
