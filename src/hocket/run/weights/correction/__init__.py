"""Corrections for stale gradients, applied to the updates of delayed stages."""
