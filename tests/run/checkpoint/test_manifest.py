"""Manifests: what is written is read, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import CheckpointError, DamagedError
from hocket.run.checkpoint.format.manifest import (
    Manifest,
    ParameterGroup,
    PartRecord,
    RunRecord,
    Section,
    TensorFile,
    TensorRecord,
    UpdateRecord,
    WorkerPart,
    from_json,
    to_json,
)
from hocket.run.checkpoint.format.opened import verify
from tests.run.checkpoint.made import save

HASH = "0123456789abcdef" * 4
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(data=json_values, seed=st.integers(-(2**63), 2**63))
def test_a_manifest_comes_back(data: Any, seed: int) -> None:
    """Every number of the user's data as it was, bit for bit."""
    run = RunRecord(
        3, seed, 2, ties={"a": ("b", "c")}, data=data, scaler={"scale": 0.1}
    )
    manifest = Manifest(1, "now", "0.1.0", run, (PartRecord("part-0.json", HASH),))
    found = from_json(Manifest, to_json(manifest), "m")
    assert found == manifest
    assert repr(found.run.data) == repr(data)


def part() -> WorkerPart:
    """With everything in it."""
    tensors = {"w": TensorRecord("F32", (2, 3), HASH)}
    file = TensorFile(Section.WEIGHTS, "weights-0.safetensors", 80, HASH, tensors)
    group = ParameterGroup({"lr": 1e-3, "betas": {"#tuple": [0.9, 0.999]}}, ("w",))
    updates = UpdateRecord("AdamW", (group,), {"w": {"step": 3}}, "StepLR", {"step": 1})
    return WorkerPart(0, 0, (file,), (updates,), {"torch": "AAAA"})


def test_a_part_comes_back() -> None:
    """With its files, groups and states."""
    assert from_json(WorkerPart, to_json(part()), "p") == part()
    assert part().files[0].num_bytes == 80 + 24


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["rank"], -1),
        (["rank"], "0"),
        (["files", 0, "name"], "../weights-0.safetensors"),
        (["files", 0, "name"], "weights-0.safetensors\n"),
        (["files", 0, "name"], "/etc/passwd"),
        (["files", 0, "section"], "code"),
        (["files", 0, "header_bytes"], -8),
        (["files", 0, "header_sha256"], "x" * 64),
        (["files", 0, "tensors", "w", "dtype"], "object"),
        (["files", 0, "tensors", "w", "shape"], [2, -3]),
        (["files", 0, "tensors", "w", "shape"], [2.5]),
        (["files", 0, "tensors", "w"], None),
        (["updates"], 3),
    ],
)
def test_hostile_values_are_refused(where: list[Any], value: Any) -> None:
    """Paths out of the folder, negative sizes, unknown types."""
    content = json.loads(to_json(part()))
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(DamagedError, match="is no part of a checkpoint"):
        from_json(WorkerPart, json.dumps(content).encode(), "p")


@given(
    st.binary(max_size=300) | st.text().map(str.encode) | json_values.map(json.dumps)
)
def test_any_other_content_is_refused(content: bytes | str) -> None:
    """With our own error, whatever it is."""
    raw = content.encode() if isinstance(content, str) else content
    with pytest.raises(DamagedError):
        from_json(Manifest, raw, "m")
    with pytest.raises(DamagedError):
        from_json(WorkerPart, raw, "m")


def test_deep_nesting_is_refused() -> None:
    """Without running out of stack."""
    for content in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(DamagedError):
            from_json(Manifest, content, "m")


@given(position=st.integers(0), new=st.binary(min_size=1, max_size=20))
def test_manifests_of_anyone_end_in_our_errors(
    position: int, new: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A manifest that is changed together with its hash is read, or refused as ours.

    What is read is what the file says: written again, it is the same manifest.
    """
    folder = tmp_path_factory.mktemp("hostile")
    path = save(folder, 1)
    (folder / "latest").unlink()
    content = (path / "manifest.json").read_bytes()
    at = position % len(content)
    content = content[:at] + new + content[at + len(new) :]
    (path / "manifest.json").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    try:
        opened = verify(path)
    except CheckpointError:
        return
    assert opened.manifest == from_json(Manifest, content, "m")
    assert from_json(Manifest, to_json(opened.manifest), "m") == opened.manifest
