"""Hold when ops happened, predicted or measured, and the memory in use meanwhile.

Imports `core`. Begin with `timeline.py`.
"""
