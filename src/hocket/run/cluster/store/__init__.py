"""The job's store: reads that end in time, and values that workers exchange there.

`cluster/world.py` finds it, `deadline_store.py` bounds each call, `poll.py` waits for a
condition, `store_exchange.py` gathers and broadcasts JSON. Imports `run.diagnostics`.
Begin with `store_exchange.py`.
"""
