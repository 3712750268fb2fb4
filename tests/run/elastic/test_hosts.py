"""Two hosts freeze layers and change their layout, and end together."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.run.support import freezing_workers
from tests.run.support.forked_python import ForkedPython
from tests.run.support.freezing_workers import emulated
from tests.run.support.network import (
    ADDRESSES,
    PORT,
    Hosts,
    codes_of,
    outputs,
    two_hosts,
)
from tests.run.support.processes import eventually

SCRIPT: Final = Path(freezing_workers.__file__)
WHOLE_S: Final = 150.0  # for four Pythons to import torch on a busy machine
END_S: Final = 15.0
CASE: Final = {"options": "clipped", "policy": "alpha", "shapes": "recut"}

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]


def start(hosts: Hosts, case: dict[str, Any], folder: Path) -> list[ForkedPython]:
    """Torchrun on both hosts, with a worker on each."""
    address = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    script = [str(SCRIPT), str(folder), json.dumps(case)]
    return [
        hosts.torchrun(host, [*address, "--node-rank", str(host)], script, folder)
        for host in range(2)
    ]


def have_come(folder: Path, place: str) -> bool:
    """Whether both workers come to a place in time."""
    return eventually(
        lambda: all((folder / f"{place}-{rank}").exists() for rank in range(2)), WHOLE_S
    )


def test_two_hosts_freeze_as_one_process(tmp_path: Path) -> None:
    """Two stages over the cable, then a replica on each host."""
    case = {**CASE, "change": {4: (1, 2)}}
    with two_hosts() as hosts:
        launchers = start(hosts, case, tmp_path)
        assert codes_of(launchers, WHOLE_S, tmp_path) == [0, 0], outputs(tmp_path)
    losses, model = emulated("clipped", "LayerNorm", [0, 0, 4, 4, 6, 6, 7, 7, 8])
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.result.json").read_text())
        assert [x[1] for x in found["results"]] == ["2x1"] * 2 + ["1x2"] * 7
        assert [x[2] for x in found["results"]] == pytest.approx(losses, rel=1e-10)
        for name, value in model.state_dict().items():
            got = torch.tensor(found["state"][name], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12)


def test_no_worker_waits_for_a_host_that_was_stopped_between_steps(
    tmp_path: Path,
) -> None:
    """Its launcher is killed at the end of an epoch, where a timeline is gathered.

    No message in flight shows the end of rank 1: rank 0 waits in the store, and would
    for an hour.
    """
    waits = {"pauses": 1, "timeout_s": 3600.0}
    with two_hosts() as hosts:
        launchers = start(hosts, {**CASE, "change": {4: (1, 2)}, **waits}, tmp_path)
        assert have_come(tmp_path, "paused"), outputs(tmp_path)
        launchers[1].send_signal(signal.SIGTERM)
        assert 0 not in codes_of(launchers, 60.0, tmp_path), outputs(tmp_path)
        assert "left alone: rank 1 was stopped" in outputs(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_ends_both(tmp_path: Path, number: int) -> None:
    """Within seconds, though their layout changes after every second step."""
    case = {**CASE, "change": {4: (1, 2)}, "endless": True}
    with two_hosts() as hosts:
        launchers = start(hosts, case, tmp_path)
        assert have_come(tmp_path, "begun"), outputs(tmp_path)
        since_s = time.monotonic()
        launchers[1].send_signal(number)
        codes = codes_of(launchers, 60.0, tmp_path)
        took_s = time.monotonic() - since_s
        assert 0 not in codes, outputs(tmp_path)
        assert took_s < END_S, (took_s, outputs(tmp_path))
