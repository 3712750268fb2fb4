"""Sends tensors of a device through host memory.

Begin with `transport.py`, whose picture shows the path of a message; `copies.py`
defines the copies between device and host. Imports `run.comm` and what is before it.
"""
