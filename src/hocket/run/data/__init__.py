"""Batches: how they are read, cut into microbatches, weighted and counted.

Loaders and samplers that resume in the middle of an epoch, the part of a batch that
each worker reads, losses and metrics as means over samples.
Imports `run.comm` and what is before it. Begin with `batch.py`.
"""
