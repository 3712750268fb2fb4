"""Keeps what frozen layers compute, so that no sample goes through them twice.

Imports `errors` and numpy, and no torch. Begin with `settings.py`, what the
user says; `entry.py` is what is kept of a sample, `shards.py` the files, and `store.py`
puts memory and disk together.
"""
