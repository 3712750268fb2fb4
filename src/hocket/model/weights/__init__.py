"""Weights that are read, or drawn, where they are needed: models made on `meta`.

Begin with `given.py`. Imports `model/stages` and what is before it.
"""
