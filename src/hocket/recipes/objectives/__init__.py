"""What recipes train and measure: losses, metrics, and whole evaluations.

May import `hocket.recipes.data` and `hocket.run`. Begin with `losses.py`, which has one
for each kind of data; `spans.py` measures answers by their words.
"""
