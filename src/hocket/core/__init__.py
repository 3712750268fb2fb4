"""The nouns and the rules: what is to be done, in which order, and whether it is right.

Knows no torch and nothing of the rest. Begin with `op.py`, `program.py`, `schedule.py`
and `dataflow.py`; `check.py` proves, `simulate.py` predicts; `formats/` reads and
writes, `timelines/` says when things happened.
"""
