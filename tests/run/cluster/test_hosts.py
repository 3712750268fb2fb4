"""Workers on two hosts: they meet, compute what one process would, fail together."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hocket.run.diagnostics.failure import FailureCause, FailureReport, read_report
from tests.run.support import host_workers
from tests.run.support.forked_python import ForkedPython
from tests.run.support.host_workers import NUM_MICROBATCHES, plain_loop
from tests.run.support.network import (
    ADDRESSES,
    PORT,
    Hosts,
    codes_of,
    outputs,
    two_hosts,
)
from tests.run.support.processes import eventually

SCRIPT: Final = Path(host_workers.__file__)
WHOLE_S: Final = 150.0  # for four Pythons to import torch on a busy machine
TIMEOUT_S: Final = 3.0
LATE_S: Final = 10.0  # what a worker's error may take beyond the timeout
END_S: Final = 60.0  # for torchrun to see it, and for Pythons to end on a busy machine
STATIC: Final = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
# As /proc/net/tcp writes it: the bytes of the address from the last to the first.
CABLES: Final = ["0100CB0A", "0200CB0A"]

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts of one name, which leads to the loopback: the worst case."""
    with two_hosts() as made:
        yield made


def start(
    hosts: Hosts, what: str, reported: Any, folder: Path, *options: str
) -> list[ForkedPython]:
    """Torchrun on both hosts."""
    script = [str(SCRIPT), what, str(folder), json.dumps(reported)]
    return [
        hosts.torchrun(
            host, [*STATIC, "--node-rank", str(host), *options], script, folder
        )
        for host in range(2)
    ]


@pytest.mark.parametrize(
    ("num_workers", "settings", "rate"),
    [
        (1, {}, "50mbit"),
        pytest.param(2, {"num_replicas": 2}, "", marks=pytest.mark.long),
        pytest.param(2, {"schedule": "gpipe"}, "", marks=pytest.mark.long),
    ],
)
def test_two_hosts_train_as_one_process(
    hosts: Hosts,
    tmp_path: Path,
    num_workers: int,
    settings: dict[str, Any],
    rate: str,
) -> None:
    """Weights and losses are the plain loop's; memory is shared on one host only.

    No one listens where the network cannot reach, or where more than the cable can.
    """
    if rate:
        hosts.limit(rate)
    per_host = ["--nproc-per-node", str(num_workers)]
    launchers = start(hosts, "train", settings, tmp_path, *per_host)
    assert codes_of(launchers, WHOLE_S, tmp_path) == [0, 0], outputs(tmp_path)

    num_parts = NUM_MICROBATCHES * settings.get("num_replicas", 1)
    state, losses = plain_loop(num_parts)
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(found) == list(state)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-14)
    for rank in range(2 * num_workers):
        reported = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        host = rank // num_workers
        own = range(host * num_workers, (host + 1) * num_workers)
        assert reported["losses"] == pytest.approx(losses, rel=1e-10)
        assert reported["shares_memory_with"] == list(own)
        assert reported["address"] == ADDRESSES[host]
        assert set(reported["listeners"]) == {CABLES[host]}
        assert abs(reported["offset_s"]) < 0.1  # one machine has one clock


def reports(folder: Path) -> dict[int, FailureReport]:
    """What the workers left, by rank."""
    found = {}
    for path in folder.rglob("rank-*.json"):
        report = read_report(path)
        if report is not None:
            found[report.rank] = report
    return found


def check_in_time(found: dict[int, FailureReport], since_s: float) -> None:
    """Every worker has given up soon enough."""
    late_s = {rank: report.time_s - since_s for rank, report in found.items()}
    assert max(late_s.values()) < TIMEOUT_S + LATE_S, late_s


def has_begun(folder: Path, rank: int) -> bool:
    """Whether a worker is in its endless training."""
    return (folder / f"weights-{rank}.before").exists()


ENDLESS: Final[dict[str, Any]] = {"endless": True}


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_kill_on_one_host_ends_the_other(
    hosts: Hosts, tmp_path: Path, num_workers: int
) -> None:
    """At once, for the connection ends with the process; with rank, step and op."""
    culprit = 2 * num_workers - 1
    case = {
        "rank": culprit,
        "place": f"{culprit}B1",
        "when": "2",
        "fault": "kill",
        "settings": {"timeout_s": TIMEOUT_S, "run_dir": str(tmp_path)},
    }
    per_host = ["--nproc-per-node", str(num_workers)]
    launchers = start(hosts, "fail", case, tmp_path, *per_host)
    assert eventually((tmp_path / "fault").exists, WHOLE_S), outputs(tmp_path)
    assert codes_of(launchers, END_S, tmp_path) == [1, 1], outputs(tmp_path)

    reported = (tmp_path / "err-0.txt").read_text()
    others = range(num_workers)  # on the first host; one of them fails first
    assert re.search(r"rank [01] gave up at step [12] (in|after) ", reported), reported
    assert "is gone" in reported
    found = reports(tmp_path)
    assert any(found[rank].cause is FailureCause.WAITED for rank in others)
    assert set(found) >= set(others)
    check_in_time(found, since_s=(tmp_path / "fault").stat().st_mtime)


def test_a_cable_taken_out_ends_both(hosts: Hosts, tmp_path: Path) -> None:
    """No worker notices that a packet was lost; each wait ends by its timeout."""
    settings = {"timeout_s": TIMEOUT_S, "run_dir": str(tmp_path)}
    case = {**ENDLESS, "settings": settings}
    launchers = start(hosts, "fail", case, tmp_path)
    both = range(2)
    begun = eventually(lambda: all(has_begun(tmp_path, r) for r in both), WHOLE_S)
    assert begun, outputs(tmp_path)
    cut_s = time.time()
    hosts.cut()
    assert codes_of(launchers, END_S, tmp_path) == [1, 1], outputs(tmp_path)
    found = reports(tmp_path)
    check_in_time(found, since_s=cut_s)
    for rank in range(2):
        assert found[rank].cause is FailureCause.WAITED
        reported = (tmp_path / f"err-{rank}.txt").read_text()
        gave_up = re.search(rf"rank {rank} gave up at step \d+ (in|after) ", reported)
        assert gave_up, reported


@pytest.mark.long
def test_a_stopped_launcher_stops_both(hosts: Hosts, tmp_path: Path) -> None:
    """A preempted host gets SIGTERM: its worker says so, and the other one follows."""
    settings = {"timeout_s": TIMEOUT_S, "run_dir": str(tmp_path)}
    case = {**ENDLESS, "settings": settings}
    launchers = start(hosts, "fail", case, tmp_path)
    both = range(2)
    begun = eventually(lambda: all(has_begun(tmp_path, r) for r in both), WHOLE_S)
    assert begun, outputs(tmp_path)
    asked_s = time.time()
    launchers[1].send_signal(signal.SIGTERM)
    codes = codes_of(launchers, END_S, tmp_path)
    assert codes[0] == 1, outputs(tmp_path)
    assert codes[1] != 0
    found = reports(tmp_path)
    check_in_time(found, since_s=asked_s)
    assert found[1].cause is FailureCause.STOPPED
    assert found[0].cause is FailureCause.WAITED
    reported = (tmp_path / "err-1.txt").read_text()
    assert re.search(r"rank 1 was stopped at step \d+", reported), reported
