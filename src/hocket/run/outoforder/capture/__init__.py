"""Captures a training step as one graph, and cuts it into the regions of a program.

Imports torch, `model`, `run.data` and `run.stage.compiled`. Begin with `trace.py`.
"""
