"""Workers that play a schedule: stages, messages, reductions, failures."""
