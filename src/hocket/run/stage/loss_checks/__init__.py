"""Compares the loss of microbatches, which is trained, with the loss of the batch.

`batch_loss_check.py` refuses a loss that is no mean over samples, before training;
`loss_parts.py` decides that by its gradients; `step_loss_check.py` compares the whole
first step; `trial.py` computes a loss of some samples.
Imports `run.data` and what is before it. Begin with `batch_loss_check.py`.
"""
