"""Prove one property of a schedule in each file, for `hocket.core.check`.

faults, complete: the right ops, each once      play: every lane comes to its end
happens_before: paths of events between ops, what ops use in common, what is alive
links: the order of messages under the strictest links

Imports the other files of `core`. Begin with `check.py` beside this folder.
"""
