"""Training a recipe: the task, the loop over steps, and the folder that a run leaves.

May import all other rooms of `recipes` and `hocket.run`. Begin with `train`, which
every worker calls; `loop` trains, evaluates and saves in turn, and `records` are the
rows that it writes.
"""
