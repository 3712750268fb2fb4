"""When ops happened, predicted or measured, and what was held meanwhile.

Imports `core`. Begin with `timeline.py`.
"""
