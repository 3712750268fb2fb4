"""Plays an order of a step's regions in the lanes of a device.

Imports `capture` and `run.device`. Begin with `step_replay.py`.
"""
