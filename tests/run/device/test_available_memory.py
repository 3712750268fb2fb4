"""How much memory a plan may use on each device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hocket import cuda
from hocket.run.cluster.world import single_process_world
from hocket.run.device.memory import host_bytes, memory_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "expected_gib"),
    [(1, 1, 54.0), (2, 2, 54.0), (2, 1, 27.0), (3, 2, 27.0)],
)
def test_workers_share_what_is_free_of_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
    num_workers: int,
    num_gpus: int,
    expected_gib: float,
) -> None:
    """60 GiB are there of a GPU's 80; a tenth stays for what no tensor holds."""
    monkeypatch.setattr(cuda, "available_bytes", lambda _: 60 * GIB)
    monkeypatch.setattr(cuda, "num_devices", lambda: num_gpus)
    world = single_process_world(torch.device("cpu"))
    hosts = world.hosts * num_workers
    here = replace(world, device=torch.device("cuda", 0), hosts=hosts)

    assert memory_bytes(here) == int(expected_gib * GIB)


def test_workers_on_cpus_share_the_hosts() -> None:
    """Two of them have half each."""
    world = single_process_world(torch.device("cpu"))

    alone, both = (memory_bytes(replace(world, hosts=world.hosts * n)) for n in (1, 2))

    assert alone == int(0.9 * host_bytes())
    assert both == pytest.approx(alone / 2, abs=1)
