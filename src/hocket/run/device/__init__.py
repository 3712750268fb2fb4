"""The device that a worker computes on: lanes, events, random state, memory, clocks.

The engine knows only the interface in `device.py`. Adapters: `cpu.py` (more lanes are
threads), `cuda.py` (lanes are streams). `sanitize.py` finds races of two lanes;
`cpu_lane.py` lets tests choose the order of a CPU's lanes; `copies.py` copies between a
device and the host; `late.py` is a value that is read when it is looked at.
Imports `run.cluster` and what is before it. Begin with `device.py`.
"""
