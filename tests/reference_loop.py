"""A plugin of pytest: a fixed training loop, timed, says how fast this machine is.

What `make test` takes has a meaning on another machine only beside such a number.
"""

from __future__ import annotations

import time
from typing import Final

import pytest

USUAL_S: Final = 0.49  # on two cores of an AMD EPYC 9005, when nothing else runs
NUM_STEPS: Final = 200
NUM_TRIES: Final = 3  # the best counts: other work only slows it


def reference_loop_s() -> float:
    """The seconds of a small network's training, on one core."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())] * 4
    model = nn.Sequential(*layers, nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(128, 256), torch.randint(0, 16, (128,))

    def train() -> float:
        begin_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return time.perf_counter() - begin_s

    return min(train() for _ in range(NUM_TRIES))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the loop's time here and where the suite is usually timed."""
    if config.getoption("numprocesses", None):
        took_s = reference_loop_s()
        terminalreporter.section("reference loop")
        terminalreporter.line(
            f"{took_s:.2f} s on this machine; {USUAL_S:.2f} s where the tests take"
            f" 9 minutes on two cores"
        )
