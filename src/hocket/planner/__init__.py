"""Chooses how to train: balances stages, predicts and ranks candidates.

Imports `core`, `schedules`, `passes` and `draw`, and no torch. Begin with `rank.py`;
`predict.py` prices one candidate, `search/` finds the best order of one program.
"""
