"""Profiles are kept as JSON, found again, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.profile.profile import (
    LayerProfile,
    Profile,
    conditions_of,
    key_of,
    mean_profile,
    path_of,
)

CPU = torch.device("cpu")


def layer(name: str, forward_s: float) -> LayerProfile:
    """A layer with different numbers everywhere."""
    return LayerProfile(name, forward_s, 2e-3, 3e-3, 1e-5, 2e-5, 64, 8, 32, 16)


PROFILE = Profile((layer("a", 1e-3), layer("b", 0.1 + 0.2)), {"device": "cpu"})


def test_round_trip(tmp_path: Path) -> None:
    """Every digit of every float."""
    PROFILE.save(tmp_path / "deep" / "profile.json")

    assert Profile.load(tmp_path / "deep" / "profile.json") == PROFILE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a profile"),
        ('{"format": 0}', "profile of format 0, this hocket reads"),
        ('{"format": 5, "layers": [{"name": "a"}]}', "not a profile"),
        (json.dumps(PROFILE.to_json() | {"conditions": 3}), "not a profile"),
    ],
)
def test_a_malformed_file_names_its_path(
    tmp_path: Path, text: str, message: str
) -> None:
    """Nothing is guessed from half a file."""
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(ModelError, match=f"profile.json: {message}"):
        Profile.load(path)


def test_conditions_tell_what_numbers_depend_on(tmp_path: Path) -> None:
    """Another model, another size, another number of threads: another file."""
    small, large = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 8))
    seen = [
        conditions_of(capture(small, (torch.randn(2, 4),)), CPU),
        conditions_of(capture(large, (torch.randn(2, 4),)), CPU),
        conditions_of(capture(small, (torch.randn(3, 4),)), CPU),
    ]
    torch.set_num_threads(2)
    seen.append(conditions_of(capture(small, (torch.randn(2, 4),)), CPU))

    again = conditions_of(capture(small, (torch.randn(2, 4),)), CPU)

    assert len({path_of(tmp_path, conditions) for conditions in seen}) == 4
    assert path_of(tmp_path, again) == path_of(tmp_path, seen[3])
    assert key_of(again) in path_of(tmp_path, again).name


def test_the_mean_of_what_workers_measured() -> None:
    """Seconds are averaged; bytes are the same everywhere."""
    other = replace(PROFILE, layers=(layer("a", 3e-3), layer("b", 0.3)))

    mean = mean_profile([PROFILE, other])

    assert mean.layers[0].forward_s == pytest.approx(2e-3)
    assert mean.layers[0].activation_bytes == 64
    assert mean.conditions == PROFILE.conditions


def test_workers_must_have_measured_the_same_layers() -> None:
    """Names the worker and both lists."""
    other = replace(PROFILE, layers=(layer("a", 1e-3), layer("c", 1e-3)))

    with pytest.raises(ModelError, match=r"rank 1 .* a, c, rank 0 a, b"):
        mean_profile([PROFILE, other])
