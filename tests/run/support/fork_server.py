"""The process that workers of tests are forked from: it has imported all they need."""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

from tests.run.support.processes import ROOT


@cache
def fork_server() -> ForkServerContext:
    """Start it, once for each process that runs tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.run.support.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not pass on to the server this process's sys.path; it
        # would go on without what it cannot import, and each worker import it alone.
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
        forkserver.ensure_running()
    return context
