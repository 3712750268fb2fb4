"""Losses that read the outputs of teachers: `loss(output, targets, teachers)`.

Each is a frozen dataclass and a mean over samples or tokens: computed by microbatch,
each weighted by its samples or tokens, it is the loss of the whole batch. Calling one
changes nothing.
May import `hocket.errors`. Begin with `distillation.py`, or with `two_views.py` for
losses that compare two views of each image.
"""
