"""Compares the loss of microbatches, which is trained, with the loss of the batch.

`step_loss_check.py` refuses a loss that changes when all samples are there twice, and
compares the gradients of steps; `divisors.py` finds what a loss divides by; `trial.py`
computes a loss of some samples, and leaves nothing changed.
Imports `run.data` and what is before it. Begin with `step_loss_check.py`.
"""
