"""Chooses how to train: balances stages, predicts and ranks candidates."""
