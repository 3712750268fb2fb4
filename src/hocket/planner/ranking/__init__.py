"""What a plan prints: candidates, the best first, as a table, a page and a picture.

Imports `planner` and what is before it. Begin with `ranking.py`.
"""
