"""Programs of several nets: their setup, and losses over a whole batch.

Imports `run.weights` and what is before it, and from the engine what plays ops. Begin
with `net_setup.py`; `nets.py` captures and cuts all nets for `ProgramRun`, and
`batch_loss.py` plays ops L and G.
"""
