"""Keeps what frozen layers compute, so that no sample goes through them twice.

Imports `errors`, `freeze.policy` and numpy, and no torch. Begin with `settings.py`,
what the user says, and `store.py`, which puts memory and disk together; `shard.py` is a
file of entries, `next_use.py` decides which entries leave, and `payoff.py` whether
reading pays.
"""
