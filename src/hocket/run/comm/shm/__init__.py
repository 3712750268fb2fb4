"""Messages between processes of one host, through memory that both map.

Begin with `transport.py`, which draws a channel and receives; `sender.py` sends.
Imports `run.comm` and what is before it.
"""
