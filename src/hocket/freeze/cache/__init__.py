"""Keeps what frozen layers compute, so that no sample goes through them twice.

Imports `errors`, `freeze.plain_numbers` and numpy, and no torch. Begin with
`settings.py`, what the user says, and `store.py`, which puts memory and disk together;
`entry.py` is what is kept of a sample, `shard.py` a file of entries, `next_use.py`
decides which entries leave, and `payoff.py` whether reading pays.
"""
