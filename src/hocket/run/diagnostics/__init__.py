"""What a worker leaves behind for the report of a failure.

The job's folder, the flight recorder (a ring of the last ops that survives a kill),
the record of one failure, and the root cause among those of all workers.
Imports `hocket.errors` and `hocket.env` only. Begin with `flight_recorder.py`.
"""
