"""What is known of a model before there is an order: its profile, and its stages.

`profiled_model.py` captures a model and measures its layers; `cut_model.py` cuts it
into stages with costs. Orders are chosen from these; `tune/build.py` makes the plan.
Imports `model` and what `tune` may. Begin with `profiled_model.py`.
"""
