"""Freezing layers while training runs: what each part of it brings."""
