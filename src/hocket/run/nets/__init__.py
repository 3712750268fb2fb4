"""A net that is cut again while training runs, and how its state moves.

Imports `stage`, `data`, `comm`, `device`, `cluster` and `diagnostics`. Begin with
`net.py`: one net on one worker, and which worker sends what to which.
"""
