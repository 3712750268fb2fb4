"""Profiles are kept as JSON, found again, and refused where they do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    return LayerProfile(
        name,
        forward_s,
        2e-3,
        3e-3,
        64,
        8,
        32,
        16,
        forward_spread_s=1e-5,
        backward_spread_s=2e-5,
    )


PROFILE = Profile((layer("a", 1e-3), layer("b", 0.1 + 0.2)), {"device": "cpu"}, 0.05)


def test_round_trip(tmp_path: Path) -> None:
    """Every digit of every float."""
    PROFILE.save(tmp_path / "deep" / "profile.json")

    assert Profile.load(tmp_path / "deep" / "profile.json") == PROFILE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("core_wait", "spread_s", "words"),
    [
        (0.1, 1.0, ""),
        (0.11, 0.0, "threads had a worker's core for 11 % of the time in which the l"),
        (0.3, 9.0, "for 30 %"),
        (0.0, 220.0, "the layers' times spread by 2200 %"),
    ],
)
def test_a_busy_machine_is_noticed(
    monkeypatch: pytest.MonkeyPatch, core_wait: float, spread_s: float, words: str
) -> None:
    """By what others took of a core, or by times that differ by more than themselves.

    Unless its user wants to keep what is measured there.
    """
    of_ten_s = replace(PROFILE.layers[0], forward_s=10.0, forward_spread_s=spread_s)
    layer = replace(of_ten_s, input_grad_s=0.0, weight_grad_s=0.0)
    found = Profile((layer,), {}, core_wait)
    assert found.noise == ""
    monkeypatch.setenv("HOCKET_KEEP_BUSY_PROFILES", "0")
    assert words in found.noise
    assert bool(words) == bool(found.noise)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a profile"),
        ('{"format": 0}', "profile of format 0, this hocket reads"),
        ('{"format": 6, "layers": [{"name": "a"}]}', "not a profile"),
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


def changed(key: str, value: Any) -> str:
    """The profile with one other value in its first layer, as JSON."""
    document = PROFILE.to_json()
    document["layers"][0][key] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "format is missing"),
        ("[" * 100_000, r"recursion.*\(line 1\)"),
        ("\n" + "9" * 5000, r"4300.*\(line 2\)"),
        (
            changed("forward_s", float("nan")),
            r"layers\[0\].forward_s is nan, which no t",
        ),
        (changed("forward_s", -1), r"layers\[0\].forward_s is -1, which no time"),
        (
            changed("forward_s", 10**400),
            "forward_s is 1000.*which no time",
        ),
        (changed("activation_bytes", 10**400), "which no size"),
        (changed("activation_bytes", 1.5), "another type"),
        (changed("name", 3), r"layers\[0\].name is 3"),
        (json.dumps(PROFILE.to_json() | {"layers": {}}), "layers is {}"),
        (json.dumps(PROFILE.to_json() | {"core_wait": -1}), "core_wait is -1, which"),
    ],
)
def test_impossible_values_are_refused_where_they_are(
    tmp_path: Path, text: str, words: str
) -> None:
    """They used to become plans, or tracebacks."""
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=f"profile.json: .*{words}"):
        Profile.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=3), x),
    max_leaves=3,
)


@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    """What is read is as good as measured."""
    document = PROFILE.to_json()
    first = document["layers"][0]
    place = data.draw(st.sampled_from([document, first, document["conditions"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    try:
        read = Profile.from_json(document, path="profile.json")
    except ModelError as error:
        message = str(error)
    else:
        message = "profile.json"
        assert all(math.isfinite(seconds) for seconds in read.layer_s)
    assert message.startswith("profile.json")


def test_a_profile_of_other_layers_is_refused(tmp_path: Path) -> None:
    """Under the right name, as after a copy by hand."""
    PROFILE.check_layers(["a", "b"], tmp_path)
    with pytest.raises(ModelError, match="of the 2 layers a, b, but the model has the"):
        PROFILE.check_layers(["a"], tmp_path)


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


def test_the_mean_says_how_much_devices_of_other_kinds_differ() -> None:
    """Relative to the mean; nothing where all are of one kind."""
    slow = [layer(x.name, 3 * x.forward_s) for x in PROFILE.layers]
    slow = [replace(x, input_grad_s=6e-3, weight_grad_s=9e-3) for x in slow]
    other = Profile(tuple(slow), {"device": "cpu", "device_name": "slow"})

    assert mean_profile([PROFILE, other]).slowness == pytest.approx((0.5, 1.5))
    assert mean_profile([PROFILE, PROFILE]).slowness == ()


def test_workers_must_have_measured_the_same_layers() -> None:
    """Names the worker and both lists."""
    other = replace(PROFILE, layers=(layer("a", 1e-3), layer("c", 1e-3)))

    with pytest.raises(ModelError, match=r"rank 1 .* a, c, rank 0 a, b"):
        mean_profile([PROFILE, other])
