"""A model's graph of calls, and what each call did in one run.

Imports `hocket.core` only. Begin with `trace.py`; `layers.py` says where a model can
be cut.
"""
