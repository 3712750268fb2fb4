"""Jobs in processes of their own, at the gates of the process that starts them.

Begin with `job_process`, which has both sides; a job's code runs in the same
`running.runner.JobRunner` as in a thread. Imports running and run.
"""
