"""Checkpoints: seconds, bytes per second, and what saving takes from a step."""
