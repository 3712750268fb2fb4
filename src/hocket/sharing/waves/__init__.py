"""One job in two waves, `tick` and `tock`, each in a lane of one device (Wavelet).

`order.py` says which lane does what, and what waits for what; it knows no torch.
`wave.py` is one wave and its copy of the model, `waves.py` plays both, and `saved.py`
writes and reads their checkpoints. Imports `run`. Begin with `order.py`.
"""
