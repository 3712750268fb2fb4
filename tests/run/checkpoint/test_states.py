"""States that are whole, but of a wrong kind: refused before anything changes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hocket
from hocket.errors import CheckpointError
from hocket.run.checkpoint.format.folder import Pointer
from tests.run.checkpoint.jobs import data_of, make_pipeline

CASE = {"model": "tied"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint behind the second step."""
    folder = tmp_path_factory.mktemp("run")
    with make_pipeline(None, CASE) as pipeline:
        for batch in data_of(CASE)[:2]:
            pipeline.step(batch)
        pipeline.save(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(run: Path) -> Iterator[hocket.Pipeline]:
    """The same pipeline, at another step."""
    with make_pipeline(None, CASE) as pipeline:
        pipeline.step(data_of(CASE)[0])
        yield pipeline


def forge(run: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with other records and the right hashes of them."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("lock"))
    path = hocket.checkpoint.newest(target)
    assert path is not None
    part = json.loads((path / "part-0.json").read_text())
    change(part)
    content = json.dumps(part).encode()
    (path / "part-0.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["parts"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    (path / "manifest.sha256").write_text(f"{sha256}  manifest.json\n")
    (target / "latest").write_text(Pointer(path.name, sha256).text)
    return target


def state_of(pipeline: hocket.Pipeline) -> list[Any]:
    """Copies of all that a load may change."""
    (updater,) = pipeline._executor.updaters.values()
    assert updater.optimizer is not None
    assert updater.scheduler is not None
    return [
        {name: x.clone() for name, x in pipeline.state_dict().items()},
        {name: x.clone() for name, x in (updater.ema or {}).items()},
        [
            {k: x.clone() if isinstance(x, Tensor) else x for k, x in state.items()}
            for state in updater.optimizer.state.values()
        ],
        [group["lr"] for group in updater.optimizer.param_groups],
        str(updater.scheduler.state_dict()),
        torch.get_rng_state(),
    ]


def same(a: Any, b: Any) -> bool:
    """Equal in every number."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def update(part: dict[str, Any]) -> Any:
    """The record of the first optimizer."""
    return part["updates"][0]


def state(part: dict[str, Any]) -> Any:
    """The state of the first parameter."""
    return next(iter(update(part)["states"].values()))


def exchange_tensors(part: dict[str, Any]) -> None:
    """A moment becomes that of a parameter of another shape."""
    every = list(update(part)["states"].values())
    own = part["files"][0]["tensors"]
    names = list(update(part)["states"])
    shape = own[names[0]]["shape"]
    other = next(i for i, x in enumerate(names) if own[x]["shape"] != shape)
    every[0]["exp_avg"] = every[other]["exp_avg"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda x: update(x).update(states=dict.fromkeys(update(x)["states"], 5)),
            "a number, where this run keeps a dict",
        ),
        (lambda x: state(x).update(exp_avg=1.0), "exp_avg: .* a number, where .* tens"),
        (lambda x: state(x).update(exp_avg=None), "exp_avg: .* a NoneType"),
        (lambda x: state(x).update(step=[1]), "step: .* a list"),
        (lambda x: state(x).pop("step"), "has nothing, where this run keeps step"),
        (lambda x: state(x).update(exp_avg={"#tuple": 5}), "is not valid"),
        (exchange_tensors, r"exp_avg: .*torch.float64\[.*torch.float64\["),
        (lambda x: update(x)["groups"][0]["options"].update(lr="fast"), "options/lr"),
        (lambda x: update(x).update(scheduler_state=[1]), "rate schedule: .* a list"),
        (
            lambda x: update(x)["scheduler_state"].update(last_epoch="x"),
            "schedule/last_epoch: .* a str",
        ),
        (lambda x: x["random"].update(python=[3, 5, None]), "random states"),
        (
            lambda x: x["random"].update(numpy=["MT19937", [1], 2]),
            "random states",
        ),
    ],
)
def test_states_of_a_wrong_kind_change_nothing(
    run: Path,
    pipeline: hocket.Pipeline,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    words: str,
) -> None:
    """Each used to end in a traceback in the middle of the load, or a step later."""
    before = state_of(pipeline)
    folder = forge(run, tmp_path / "forged", change)
    with pytest.raises(CheckpointError, match=words):
        pipeline.load(folder)
    assert same(state_of(pipeline), before)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(
            st.sampled_from(["#tensor", "#tuple", "#pairs", "#counter", "x"]),
            x,
            max_size=2,
        )
    ),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container of JSON with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        place
        for key, x in items
        for place in [
            (value, key),
            *(places(x) if isinstance(x, dict | list) and len(x) < 100 else []),
        ]
    ]


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_value_anywhere_is_loaded_or_refused(
    run: Path,
    pipeline: hocket.Pipeline,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    """No traceback; and where it is refused, nothing has changed."""

    def change(part: dict[str, Any]) -> None:
        within = {key: part[key] for key in ("updates", "random")}
        container, key = data.draw(st.sampled_from(places(within)))
        container[key] = data.draw(JSON)
        part.update(within)

    folder = forge(run, tmp_path_factory.mktemp("fuzzed") / "run", change)
    before = state_of(pipeline)
    try:
        pipeline.load(folder)
    except CheckpointError:
        assert same(state_of(pipeline), before)
    else:
        pipeline.load(run)
