"""Prove one property of a schedule in each file, for `hocket.core.check`.

program_faults: the program's facts agree
faults: the right ops, each once      play: every lane comes to its end
happens_before, shared: paths of events between ops, and what ops use in common
conflicts, collectives: what must have one order has one      alive: versions, gradients

Imports the other files of `core`. Begin with `check.py` beside this folder.
"""
