"""Messages between two workers, and sums over all workers.

`transport.py` is the interface of every transport; `shm/` uses shared memory on one
host, `dist/` torch.distributed, `staged.py` copies a GPU's tensors to the host first;
`transports.py` chooses. `schema.py` describes the tensors of one message. Imports
`run.device` and what is before it. Begin with `transport.py`.
"""
