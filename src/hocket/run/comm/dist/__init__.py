"""Messages through torch.distributed: gloo for the host's tensors, NCCL for GPUs'.

`transport.py` is gloo's. `ordered.py` is NCCL's, and `pair_wires.py` moves a group of
messages there. Imports `run.comm` and what is before it. Begin with `transport.py`.
"""
