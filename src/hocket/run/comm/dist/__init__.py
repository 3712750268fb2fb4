"""Messages through torch.distributed: gloo for CPUs, NCCL for GPUs.

Begin with `transport.py`; `wire.py` moves one message. Imports `run.comm` and what is
before it.
"""
