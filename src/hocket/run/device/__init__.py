"""The device that a worker computes on: its memory and its clocks.

Imports `run.cluster` and what is before it. Begin with `memory.py`.
"""
