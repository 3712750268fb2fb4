"""`python -m hocket`: the command line, also for `torchrun -m hocket`."""

from __future__ import annotations

from hocket.cli.main import app

app()
