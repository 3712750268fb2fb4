"""Plays the lanes of one device: ops, inputs and outputs, messages, times.

`play_plan.py` cuts a schedule into portions, and `player.py` plays them: what an op
table says for each op (`action.py`). `stage_table.py` is the table of a device's
stages: `stage_ops.py` has the ops of one stage, `ports.py` its inputs and outputs,
`step_end.py` reductions and updates; `point_to_point.py` sends messages. Imports
`run.weights` and what is before it, and `run.engine.sync`. Begin with `action.py`.
"""
