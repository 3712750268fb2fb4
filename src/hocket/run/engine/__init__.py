"""Trains: reads batches, plays every lane of a schedule, and hands out results.

`driver.py` plays portions as batches come; `lanes/` plays the lanes of one device;
`sync/` has losses and gates; `programs/` has what several nets need; `emulator/` is the
single-process oracle; `make_executor.py` puts a worker together.
Imports `run.weights` and what is before it. Begin with `driver.py`.
"""
