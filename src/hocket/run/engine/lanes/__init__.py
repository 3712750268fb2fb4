"""Plays the lanes of one device: ops, inputs and outputs, messages, times.

`play_plan.py` cuts a schedule into portions, `player.py` plays them, `stage_ops.py` has
the ops of one stage, `ports.py` makes its inputs and outputs, `point_to_point.py` sends
messages, `step_end.py` plays reductions and updates. Imports `run.weights` and what is
before it, and `run.engine.sync`. Begin with `play_plan.py`.
"""
