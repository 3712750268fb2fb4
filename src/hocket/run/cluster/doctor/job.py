"""Checks that need several workers: rendezvous, clocks, software and links."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

import torch

from hocket import env
from hocket.draw.quantity import seconds
from hocket.run.cluster.clock import clock_offset_s
from hocket.run.cluster.doctor.finding import Finding, Severity
from hocket.run.cluster.doctor.links import judge_links, measure_links
from hocket.run.cluster.doctor.versions import judge_same_versions, probe_versions
from hocket.run.cluster.world import World

_SKEW_S: Final = 0.1  # reports of failures are put in order by the time of day


def examine_job(world: World) -> Iterator[Finding]:
    """Run every check that needs other workers. Every worker must call this.

    Args:
        world: the job; at least two workers.
    """
    yield judge_rendezvous(world.hosts, world.gather_json(interface_of(world)))
    versions = world.gather_json(asdict(probe_versions()), "versions")
    yield judge_same_versions(versions)
    skew_s = clock_offset_s(world.rank, world.hosts, time.time)
    yield judge_clocks(world.hosts, world.gather_json(skew_s, "clocks"))
    devices = {torch.device("cpu"), world.device}
    for device in sorted(devices, key=str):
        backend = "gloo" if device.type == "cpu" else "NCCL"
        yield judge_links(measure_links(world, device), backend)


def interface_of(world: World) -> str:
    """Describe the interface that this worker listens on."""
    interface = env.GLOO_INTERFACE.text() or "what its name leads to"
    return f"{interface} ({world.address})" if world.address else interface


def judge_rendezvous(hosts: Sequence[str], interfaces: Sequence[str]) -> Finding:
    """Report how the workers found each other.

    Args:
        hosts: the host of each rank.
        interfaces: the interface that each rank listens on.
    """
    num_hosts = len(set(hosts))
    kinds = ", ".join(dict.fromkeys(interfaces))
    found = (
        f"{len(hosts)} workers on {num_hosts} host{'s' * (num_hosts > 1)} met, over "
        f"{kinds}"
    )
    return Finding("rendezvous", Severity.OK, found)


def judge_failed_rendezvous(error: Exception) -> Finding:
    """Report why the workers did not find each other."""
    return Finding(
        "rendezvous",
        Severity.FAIL,
        str(error),
        "the same --rdzv-endpoint (or --master-addr and --master-port) on every host, "
        "an address that all of them reach (`nc -vz ADDRESS PORT`), no firewall "
        "between, and --local-addr where a host's name leads elsewhere",
    )


def judge_clocks(hosts: Sequence[str], skews_s: Sequence[float]) -> Finding:
    """Check that the hosts agree on the time of day.

    Args:
        hosts: the host of each rank.
        skews_s: how far rank 0's clock is ahead of each rank's.
    """
    numbers = {"skews_s": list(skews_s)}
    if len(set(hosts)) == 1:
        return Finding("clocks", Severity.OK, "one host has one clock", numbers=numbers)
    spread_s = max(skews_s) - min(skews_s)
    found = f"the hosts' clocks are {seconds(spread_s)} apart"
    if spread_s <= _SKEW_S:
        return Finding("clocks", Severity.OK, found, numbers=numbers)
    return Finding(
        "clocks",
        Severity.WARN,
        f"{found} (rank {skews_s.index(max(skews_s))} is the last): the order of "
        "failures on different hosts will be reported wrong",
        "run chrony or systemd-timesyncd on every host (`timedatectl` shows whether)",
        numbers,
    )
