"""The doctor on several workers: links, and how they met."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from hocket.errors import WaitError
from hocket.run.cluster.doctor.examine import (
    MeasuredLink,
    judge_failed_rendezvous,
    judge_links,
    judge_rendezvous,
    pairs_of,
)
from hocket.run.cluster.doctor.finding import Finding, Severity
from tests.run.cluster.doctor.test_host_checks import check
from tests.run.support.forked import run_forked

TWO: Final = ("a", "a", "b", "b")


def links(*speeds: float, same_host: bool = True) -> list[MeasuredLink]:
    """Of rank 0 with each other."""
    return [
        MeasuredLink((0, other), same_host, speed, 1e-4)
        for other, speed in enumerate(speeds, start=1)
    ]


def test_links_that_are_equal() -> None:
    """The median of each kind is reported."""
    near, far = links(2e9, 1.9e9, 2.1e9), links(1e9, same_host=False)
    reported = ["3 pairs on one host at 1.863 GiB/s, 100 µs", "1 pair between hosts"]
    check(judge_links([*near, *far], "gloo"), Severity.OK, *reported)


def test_a_link_that_stands_out() -> None:
    """A third of what the others of its kind have; another kind is no measure."""
    check(judge_links(links(2e9, 1.9e9, 1e8), "gloo"), Severity.WARN, "slow: 0 and 3")
    mixed = [*links(2e10, 2e10), *links(1e9, 1e9, same_host=False)]
    check(judge_links(mixed, "gloo"), Severity.OK)


def test_links_that_are_all_slow() -> None:
    """Below 100 Mb/s training is useless."""
    slow = judge_links(links(5e6, 5e6, same_host=False), "gloo")
    check(slow, Severity.WARN, "slow: 0 and 1, 0 and 2, at worst 4.768 MiB/s")


def test_a_link_that_is_broken() -> None:
    """Who, and what the backend said."""
    broken = [
        *links(2e9),
        MeasuredLink((2, 5), False, 0.0, 0.0, "timed out connecting"),
    ]
    reported = ["1 of 2 pairs cannot: ranks 2 and 5: timed out", "firewall"]
    check(judge_links(broken, "NCCL"), Severity.FAIL, *reported)


@pytest.mark.parametrize("num_hosts", [1, 3, 40])
@pytest.mark.parametrize("per_host", [1, 2, 8])
def test_pairs(num_hosts: int, per_host: int) -> None:
    """All of few, some of many; every worker is in one, and each comes once."""
    hosts = [f"host {host}" for host in range(num_hosts) for _ in range(per_host)]
    pairs = pairs_of(hosts)
    assert len(pairs) == len(set(pairs)) <= 64
    assert all(a < b < len(hosts) for a, b in pairs)
    if len(hosts) <= 8:
        assert len(pairs) == len(hosts) * (len(hosts) - 1) // 2
    if 1 < len(hosts) <= 64:
        assert {rank for pair in pairs for rank in pair} == set(range(len(hosts)))


def test_rendezvous() -> None:
    """Over what, and why not."""
    met = judge_rendezvous(TWO, ["eth0 (10.0.0.1)"] * 2 + ["ib0 (10.0.0.2)"] * 2)
    reported = "4 workers on 2 hosts met, over eth0 (10.0.0.1), ib0 (10.0.0.2)"
    check(met, Severity.OK, reported)
    check(judge_failed_rendezvous(WaitError("no rank 1")), Severity.FAIL, "no rank 1")


@pytest.mark.timeout(60)
def test_workers_examine_their_job(tmp_path: Path) -> None:
    """Really: two of them add up, compare what they run, and rank 0 has it all."""
    outcome = run_forked(
        "hocket.run.cluster.doctor.examine:worker", folder=tmp_path, timeout_s=20.0
    )
    assert outcome.codes == {0: 0, 1: 0}, outcome.output
    assert outcome.results[1] == []
    reported: list[Any] = outcome.results[0]
    found = {one["check"]: Finding.from_json(one) for one in reported}
    assert len(found) == len(reported)
    assert found["rendezvous"].found == "2 workers on 1 host met, over lo"
    assert found["same versions"].severity is Severity.OK
    gloo = found["all-reduce, gloo"]
    assert gloo.severity is not Severity.FAIL
    [link] = _links_in(gloo)
    assert link["ranks"] == [0, 1]
    assert link["bytes_per_s"] > 1e6
    assert 0 < link["latency_s"] < 1.0


def _links_in(finding: Finding) -> Any:
    return finding.numbers["links"]
