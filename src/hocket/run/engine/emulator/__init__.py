"""Trains any program in one process: the oracle of every run.

Imports `weights` and every room below it. Begin with `emulate.py` beside this folder;
`net.py` is one model, `batch.py` one step's batch and losses.
"""
