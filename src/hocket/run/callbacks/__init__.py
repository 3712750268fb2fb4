"""Callbacks of training: loggers, early stopping, and the errors of what only watches.

May import `engine` and what is before it. Begin with `callbacks.py`, which calls them;
`loggers.py` passes numbers on, `early_stop.py` ends training.
"""
