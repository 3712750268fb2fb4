"""One stage: forward and backward of single microbatches, and the state between.

`runner.py` runs it, `stage_loss.py` computes its losses; beside them are the state
between both, recomputation, precision,
random numbers, versions of the weights; `split/` divides a backward into I and W,
`compiled/` compiles a stage, `loss_checks/` compares a loss with that of the batch.
Imports `run.data` and what is before it. Begin with `runner.py`.
"""
