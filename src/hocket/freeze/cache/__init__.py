"""Keeps what frozen layers compute, so that no sample goes through them twice.

Imports `errors`, `freeze.settings` (what the user says) and numpy, and no torch. Begin
with `store.py`, which puts memory and disk together; `shard.py` is a file of entries,
`next_use.py` decides which entries leave, and `payoff.py` whether reading pays.
"""
