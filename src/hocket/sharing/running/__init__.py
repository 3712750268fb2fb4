"""Jobs on threads: their gates, random state, counted memory, errors.

`share` is the function, `runner` one job's thread. Imports `sharing`, `run.device` and
`model`. Begin with `share.py`.
"""
