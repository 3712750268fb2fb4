"""One stage, one microbatch: forward, backward, and what lives between them.

`runner.py` runs it; beside it are recomputation, precision, random numbers, versions of
the weights; `split/` divides a backward into I and W, `compiled/` compiles a stage.
Imports `run.data` and what is before it. Begin with `runner.py`.
"""
