"""Libraries that people combine a pipeline with, one script each."""
