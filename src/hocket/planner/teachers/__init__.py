"""Plan a student and its teacher on the same devices: both cuts, and what it gains.

Imports what the planner's other files import, and `passes`. Begin with `compare`.
"""
