"""A model's work as a list of nodes, and what was observed of it.

Imports `hocket.core` only. Begin with `trace.py`; `layers.py` says where a model can
be cut.
"""
