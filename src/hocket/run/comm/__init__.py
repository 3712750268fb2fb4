"""Messages between two workers, and sums over all workers.

`transport.py` says what every transport promises; `shm/` keeps it through shared memory
on one host, `dist/` through torch.distributed; `transports.py` chooses. `schema.py`
says what one message holds. Imports `run.device` and what is before it.
Begin with `transport.py`.
"""
