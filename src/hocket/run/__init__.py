"""The runtime: processes that run a schedule on a user's model.

Rooms, each importing only those before it: diagnostics, cluster, device, comm, data,
stage, nets, weights, engine, outoforder, fill, tune, checkpoint, elastic. On top
stand `pipeline.py` (the public object), `assembly.py` (how one is put together) and
`loggers.py` (who gets a step's numbers). Begin with `pipeline.py`,
then `engine/`.
"""
