"""What recipes measure: the usual loss, and evaluations of all outputs together.

May import `hocket.recipes.data` and `hocket.run`. Begin with `losses.py`, the loss of
data with classes; `whole.py` calls what a recipe names in `task.evaluate`.
"""
