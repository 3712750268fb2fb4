"""JAX's step of two networks runs where JAX is, and says so where it is not."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.gpu import ooo_single

ROOT = Path(__file__).parents[2]


class _Graph:
    """A graph that reads weights by their address, as one of CUDA does."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        """Read them."""
        self.num_replays += 1


def test_a_graph_holds_the_step_whose_weights_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read freed memory: only `graph.replay` was kept, and the GPU failed for all.

    A stream and a graph without CUDA; the step's model must live until the last replay.
    """
    none = {"wait_stream": lambda self, other: None}
    stream = type("Stream", (), none)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    model = nn.Linear(2, 2)
    alive = weakref.ref(model)
    batch = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(
        ooo_single, "fused", lambda parameters: torch.optim.SGD(parameters, 0.1)
    )
    replay = ooo_single.graphed(ooo_single.plain_step(model, batch))
    del model
    gc.collect()

    replay()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(find_spec("jax") is not None, reason="jax is installed")
def test_says_that_jax_is_missing(tmp_path: Path) -> None:
    """In a sentence, with the way out, and no file."""
    path = tmp_path / "jax.json"
    command = [sys.executable, "-m", "bench.gpu.ooo_single_jax", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert 'pip install "jax[cuda12]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert not path.exists()


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_jax_measures_on_a_cpu(tmp_path: Path) -> None:
    """Both networks learn."""
    path = tmp_path / "jax.json"
    options = ["--size", "small", "--output", str(path)]
    command = [sys.executable, "-m", "bench.gpu.ooo_single_jax", *options]
    subprocess.run(command, check=True, cwd=ROOT, timeout=580)
    found = json.loads(path.read_text())
    assert found["transformer"]["holds"]
    assert found["lstm"]["holds"]
