"""Messages of a device's tensors, through host memory and a transport of the host.

Begin with `transport.py`, which draws a message's way; `copies.py` is the interface of
the device's copies. Imports `run.comm` and what is before it.
"""
