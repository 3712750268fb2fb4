"""The job's store: reads that end in time, and values that workers exchange there.

`deadline_store.py` bounds each call, `store_exchange.py` gathers and broadcasts JSON,
`poll.py` waits for a condition. Imports `run.diagnostics`. Begin with
`store_exchange.py`.
"""
