"""Prove properties of a schedule, for `hocket.core.check`.

faults: the right ops, each once
happens_before: paths of events between ops, what ops use in common, what is alive
links: the order of messages under the strictest links

Imports the other files of `core`. Begin with `check.py` beside this folder.
"""
