"""Checkpoints: a run's state on disk, by the uncut model's names.

    run/checkpoints/                 the folder that users name
        lock                         the process that writes here now
        latest                       the newest complete checkpoint, and its hash
        step-00000120/
            manifest.sha256          hash of manifest.json
            manifest.json            the step, the data's position, hashes of the parts
            part-0.json              what rank 0 wrote: a hash for every tensor
            weights-0.safetensors    its part of the model, by the model's own names
            averaged-0.safetensors   their averages, where the run keeps some
            optimizer-0.safetensors  the optimizer's state, `name/key`
        old-0.safetensors        what delayed stages still read, `name/age`
            part-1.json ...
        .step-00000130/              being written; renamed when all of it is there

The way of a save:

    collect.py        what this worker holds and must write: names and live tensors
    manager.py        copied to the host, if it is written in the background
    commit.py         written, synced, confirmed by all workers, renamed, pointed to;
                      older ones removed

and of a load, on all workers together (`load.py`):

    format/folder.py  which one
    format/opened.py  manifest, parts and tensors, checked against their hashes
    match.py          is it of this model? which tensors does this worker need?
    restore.py        put in place

A model that one process trains whole is saved and loaded by `saved_run.py`.

Nothing in a checkpoint is code, and reading one runs none.
Imports `run.engine` and what is before it. Begin with `manager.py`.
"""
