"""Measured beside predicted memory."""
