"""Captures any module, cuts it into stages, and measures its layers.

Rooms, each importing only those before it: trace (a model's graph of calls), guards
(what such a graph has fixed), capture
(tracing a model), stages (cutting it), profile (its costs). Knows torch and nothing of
workers. Begin reading with `capture/capture.py`.
"""
