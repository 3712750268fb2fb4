"""Compares the loss of microbatches, which is trained, with the loss of the batch.

`batch_loss_check.py` refuses a loss that changes when all samples are there twice;
`step_loss_check.py` compares the gradients of steps, and `divisors.py` what a loss
divides by; `trial.py` computes a loss of some samples, and leaves nothing changed.
Imports `run.data` and what is before it. Begin with `batch_loss_check.py`.
"""
