"""Several training jobs on one device: who may start an iteration, and when.

`policy.decide` is the rule: a pure function of what is known of the jobs. `board` keeps
that knowledge, and `simulate` plays it with a fake clock. None of these files imports
torch; those in `running` do: jobs on threads, each with a lane of its own.
Imports `run.device`, `model.profile` and what is before them. Begin with `policy.py`.
"""
