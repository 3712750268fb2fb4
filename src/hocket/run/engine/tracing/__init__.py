"""Traces of chosen steps: torch's operators and this worker's ops on one clock.

Imports `engine/lanes` and what is before it. Begin with `step_profiler.py`.
"""
