"""The runtime: processes that run a schedule on a user's model.

Rooms, each importing only those before it: diagnostics, cluster, device, comm, data,
stage, nets, weights, engine, outoforder, fill, tune, checkpoint, elastic. On top
stand `pipeline.py` (the public object) and `assembly.py` (how one is put together).
Begin with `pipeline.py`, then `engine/`.
"""
