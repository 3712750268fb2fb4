"""Layers that freeze while training runs, and workers that change their layout.

Imports every room of `run` before it. Begin with `freezing.py`, which asks the policy;
`shape_choice.py` chooses stages and replicas, `reshape.py` cuts the net again and moves
its state (learning rate and schedule are sent to workers whose layers are all frozen),
`measures.py` and `make.py` measure layers, `cache/` keeps what frozen layers compute,
and `cache/training_order.py` says what does not go together with it.
"""
