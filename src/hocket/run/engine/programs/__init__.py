"""Programs of several nets: what flows between them, and their losses.

Imports `run.weights` and what is before it, and from the engine what plays ops. Begin
with `net_setup.py` and `wiring.py`; `nets.py` makes both for `ProgramRun`, and
`batch_loss.py` plays ops L and G.
"""
