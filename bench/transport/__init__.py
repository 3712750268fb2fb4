"""Shared memory beside gloo."""

from __future__ import annotations
