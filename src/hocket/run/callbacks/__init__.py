"""Calls loggers and callbacks; their errors are raised on all workers together.

May import `engine` and what is before it. Begin with `callbacks.py`, which calls them;
`loggers.py` passes numbers on, `early_stop.py` ends training.
"""
