"""Plans data parallelism: what each of its forms takes, and when to reduce.

`data_parallel.py` has DDP, ZeRO and FSDP; `buckets.py` chooses the buckets and the k of
reverse first-k, by simulation. May import what the rest of the planner may. Begin with
`data_parallel.py`.
"""
