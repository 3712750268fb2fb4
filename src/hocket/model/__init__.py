"""Capture any module, cut it into stages, and measure its layers.

Rooms, each importing only those before it: trace (the work as a list of nodes),
capture (how it is found), stages (how it is cut), profile (what it costs).
Knows torch and nothing of workers. Begin reading with `capture/capture.py`.
"""
