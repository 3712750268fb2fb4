"""What frozen layers compute of each sample, read again in place of computing it.

Imports `freeze/cache`, which stores entries, and the rooms of `run` before `elastic`.
Begin with `cached_prefix.py`; `kept_rows.py` reads and stores a microbatch,
`training_order.py` knows what is used next, and which loaders fit.
"""
