"""The runtime's own cut leaves out boundaries whose messages take long."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn

from hocket.core.hardware import load_catalogue
from hocket.model.profile import measure
from hocket.model.profile.profile import Profile
from hocket.run.cluster.world import single_process_world
from hocket.run.tune.link_costs import usual_cluster
from tests.run.support.forked import answers_of
from tests.run.support.joined import join
from tests.run.support.started import started

NUM_LAYERS = 12
SLOWER = 20.0  # far more than what a busy machine does to a profile


def slow_clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that a slower device would have."""
    return lambda: SLOWER * perf_counter()


def boundaries(profile_dir: str | None) -> list[int]:
    """Return the cut of equal layers, where rank 1's device is slower."""
    world = join()
    if world.rank == 1:
        patch = pytest.MonkeyPatch()
        patch.setattr(platform, "processor", lambda: "a slow processor")
        patch.setattr(measure, "clock_of", slow_clock_of)
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(NUM_LAYERS)]
    batch = torch.ones(64, 256), torch.ones(64, 256)
    with started(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        torch.optim.SGD,
        batch,
        profile_dir=profile_dir,
        world=world,
    ) as pipeline:
        return list(pipeline.plan.boundaries)


CPU = torch.device("cpu")
WIDE = 4  # the boundary that two equal stages of eight equal layers would have
LAYER_S = 1e-3


def cut(folder: Path) -> tuple[int, ...]:
    """Boundaries of two stages on one worker, with the profile in the folder."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    batch = (torch.ones(4, 4), torch.ones(4, 4))
    with started(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD,
        batch,
        schedule="looped-bfs",
        stages_per_device=2,
        profile_dir=folder,
    ) as pipeline:
        return pipeline.plan.boundaries


def keep_equal_layers(path: Path, wide_bytes: int) -> None:
    """Replace a profile by one of equal layers, of which one receives more."""
    kept = Profile.load(path)
    equal = [
        replace(
            layer,
            forward_s=LAYER_S,
            input_grad_s=LAYER_S,
            weight_grad_s=LAYER_S,
            received_bytes=wide_bytes if number == WIDE else 0,
            received_grad_bytes=0,
        )
        for number, layer in enumerate(kept.layers)
    ]
    replace(kept, layers=tuple(equal)).save(path)


def test_a_wide_boundary_is_left_out_if_a_layer_takes_less_time(tmp_path: Path) -> None:
    """Each of two equal stages takes half as much longer as the messages between them.

    Half of a layer more is better than stages of three and five layers; one and a half
    is worse.
    """
    bytes_per_s = usual_cluster(single_process_world(CPU)).hop.bytes_per_s
    layer_bytes = round(3 * LAYER_S * bytes_per_s)  # of messages as long as a layer
    cut(tmp_path)
    (path,) = tmp_path.glob("profile-*.json")

    for wide_bytes, boundary in ((layer_bytes, 4), (3 * layer_bytes, 3)):
        keep_equal_layers(path, wide_bytes)
        assert cut(tmp_path) in ((boundary,), (8 - boundary,))


def test_workers_of_one_host_have_the_link_of_shared_memory() -> None:
    """On CPUs; a single worker is one host."""
    cluster = usual_cluster(single_process_world(CPU))
    assert cluster.hop == load_catalogue().link("shared-memory").link()


@pytest.mark.timeout(100)
def test_a_slower_device_gets_fewer_layers(tmp_path: Path) -> None:
    """As was measured on each; such profiles are of one job, and are not kept."""
    profiles = tmp_path / "profiles"
    first, second = answers_of(
        f"{__name__}:boundaries", str(profiles), folder=tmp_path / "job"
    )

    assert first == second
    assert first[0] >= 9  # of 12 layers; equal devices would have 6 each
    assert not profiles.exists()
