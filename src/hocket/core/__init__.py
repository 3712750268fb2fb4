"""Define programs and schedules, prove that they are right, and predict their times.

Imports no torch and no other room. Begin with `op.py`, `program.py`, `schedule.py` and
`dataflow.py`; `check.py` proves, `simulate.py` predicts; `formats/` reads and writes
schedules, `timelines/` holds when things happened.
"""
