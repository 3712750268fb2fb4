"""Messages between processes of one host, through memory that both map.

Begin with `transport.py`, which draws a channel; `sender.py` and `receiver.py` are its
ends. Imports `run.comm` and what is before it.
"""
