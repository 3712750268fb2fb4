"""Weights that several workers hold together: gathered, released, reduced, updated.

Begin with shards.py; a unit is what moves at a time. FSDP2 of torch shards, and
its own parts are touched in units.py alone. May import what `hocket.run.weights` may.
"""
