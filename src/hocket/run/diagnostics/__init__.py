"""The files a worker leaves behind, from which a failure is reported.

The job's folder, the flight recorder (a ring of the last ops that survives a kill),
the record of one failure, and the root cause among those of all workers.
Imports `hocket.errors` and `hocket.env` only. Begin with `flight_recorder.py`.
"""
