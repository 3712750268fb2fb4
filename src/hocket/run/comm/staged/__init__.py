"""Sends tensors of a device through host memory.

Begin with `transport.py`, whose picture shows the path of a message. The copies between
device and host are `run/device/copies.py`. Imports `run.comm` and what is before it.
"""
