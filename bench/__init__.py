"""Benchmarks: one folder per claim."""
