"""What workers exchange in a step besides values: losses, norms, and gates.

A gate is a set of stages that are judged, clipped and updated together. Imports
`run.weights` and what is before it. Begin with `gate.py`.
"""
