"""When to freeze layers, and the shapes that a shorter pipeline goes through.

Imports `errors` and `planner`, and no torch. Begin with `policy.py`: what a policy is,
how it is asked, and those that measure nothing; `measuring.py` has those that measure.
`shapes.py` chooses stages and replicas, `forecast.py` predicts how long the rest of a
run takes, and `settings.py` has the cache's settings, and checks what the user says.
"""

from __future__ import annotations

from hocket.freeze.measuring import ArgminGradient, Percentile, Plasticity
from hocket.freeze.policy import Alpha, LayerObservation, Listed, Measures, Policy

__all__ = [
    "Alpha",
    "ArgminGradient",
    "LayerObservation",
    "Listed",
    "Measures",
    "Percentile",
    "Plasticity",
    "Policy",
]
