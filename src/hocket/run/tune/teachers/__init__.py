"""A student and its teachers in one pipeline: arguments, cuts, and the joint order.

Imports what `tune`'s other files import, and `planner.teachers`. Begin with
`teacher.py`, the user's argument; `joint.py` makes the order of all nets.
"""
