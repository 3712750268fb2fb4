"""The processes of a job: ranks, hosts, rendezvous and launching.

Starts workers on one machine (`launch.py`), or joins a torchrun job (`world.py`);
ranks, hosts, process groups, clocks, deadlines, and `hocket doctor`.
Imports `run.diagnostics`. Begin with `world.py`.
"""
