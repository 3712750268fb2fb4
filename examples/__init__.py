"""Whole programs over hocket: scripts, recipes, and `zoo`, which recipes name."""
