"""Files of other programs that are damaged, or hold what no checkpoint can."""

from __future__ import annotations

import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as forms

import hocket
from hocket.errors import CheckpointError


def refused(source: Path, words: str, prefix: str = "") -> None:
    """The import fails with these words and the file's name, and makes nothing."""
    target = source.parent / "imported"
    with pytest.raises(CheckpointError, match=words) as caught:
        hocket.checkpoint.import_weights(source, target, prefix=prefix)
    assert source.name in str(caught.value)
    assert not list(target.glob("step-*"))


def assert_imported_or_refused(source: Path) -> None:
    """A whole checkpoint, or our own error that names the file."""
    words = ""
    try:
        path = hocket.checkpoint.import_weights(source, source.parent / "run")
        hocket.checkpoint.verify(path)
    except CheckpointError as error:
        words = str(error)
    assert not words or source.name in words


def torch_file(folder: Path, values: Any) -> Path:
    """Whatever is given, saved by torch."""
    torch.save(values, folder / "m.pt")
    return folder / "m.pt"


def contains_itself() -> dict[str, Any]:
    """A dict that is one of its own values."""
    values: dict[str, Any] = {"w": torch.ones(2)}
    values["again"] = values
    return values


def nested_deeply() -> dict[str, Any]:
    """A hundred dicts, one in the other."""
    values: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(100):
        values = {"m": values}
    return values


def doubles_at_each_level() -> dict[str, Any]:
    """Forty small dicts that stand for 2**40 entries."""
    values: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(40):
        values = {"a": values, "b": values}
    return values


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (contains_itself, "again.again.* contains itself"),
        (nested_deeply, "m.m.m.* more than 64 dicts deep"),
        (doubles_at_each_level, "more than 1,000,000 entries"),
    ],
)
def test_containers_that_never_end(
    make: Callable[[], dict[str, Any]], words: str, tmp_path: Path
) -> None:
    """One line, where recursion used to end in a traceback."""
    refused(torch_file(tmp_path, make()), words)


def nested_tensor() -> Tensor:
    """Rows of different lengths; torch warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
        (nested_tensor, "a nested tensor"),
        (lambda: torch.ones(3, device="meta"), "a meta tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "quan"),
        (lambda: torch.ones(3, dtype=torch.complex128), "complex128"),
    ],
)
def test_tensors_that_are_no_plain_arrays(
    make: Callable[[], Tensor], words: str, tmp_path: Path
) -> None:
    """The error names the file and the entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        source = torch_file(tmp_path, {"good": torch.ones(2), "layer.w": make()})
        refused(source, rf"m\.pt: layer\.w is .*{words}")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "a.b is there twice"),
        ({1: torch.ones(2), "1": torch.zeros(2)}, "1 is there twice"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__' names a tensor"),
        ({"": torch.ones(2)}, "'' names a tensor"),
    ],
)
def test_ambiguous_names_are_refused(
    values: dict[Any, Any], words: str, tmp_path: Path
) -> None:
    """The later one used to replace the first, or the file's own header."""
    refused(torch_file(tmp_path, values), words)


def test_only_what_is_imported_must_have_names_of_its_own(tmp_path: Path) -> None:
    """An optimizer's state beside the weights may be keyed in any way."""
    values = {"model.w": torch.ones(2), "state": {1: 0.5, "1": 0.5}}
    path = hocket.checkpoint.import_weights(
        torch_file(tmp_path, values), tmp_path / "run", prefix="model."
    )
    assert hocket.checkpoint.read_weights(path)["w"].tolist() == [1.0, 1.0]


def test_one_name_in_two_files(tmp_path: Path) -> None:
    """Both files are named: the last one used to win without a word."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number, value in enumerate((1.0, 2.0), 1):
        save_file({"w": torch.full((2,), value)}, folder / f"{number}.safetensors")
    refused(folder, r"2\.safetensors: w is there twice.*1\.safetensors")


def test_one_name_twice_in_one_header(tmp_path: Path) -> None:
    """The library that reads safetensors takes the last."""
    place = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"w": {place}, "w": {place}}}'.encode()
    header += b" " * (-len(header) % 8)
    source = tmp_path / "m.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(source, "w is there twice")


class Larger:
    """Unpickled, a tensor that has more elements than data."""

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.ones(2).storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, (99,), (1,), False, {})


@pytest.mark.parametrize("is_zip", [True, False])
def test_no_tensor_is_larger_than_its_data(*, is_zip: bool, tmp_path: Path) -> None:
    """The rest would be whatever is in memory; torch refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.save(
            {"w": Larger()},
            tmp_path / "m.pt",
            _use_new_zipfile_serialization=is_zip,
        )
    refused(tmp_path / "m.pt", "storage")


def test_conjugates_come_in_as_their_values(tmp_path: Path) -> None:
    """torch keeps them as a mark on the tensor."""
    values = torch.tensor([1 + 2j], dtype=torch.complex64)
    source = torch_file(tmp_path, {"w": values.conj()})
    path = hocket.checkpoint.import_weights(source, tmp_path / "run")
    assert hocket.checkpoint.read_weights(path)["w"].tolist() == [1 - 2j]


def distributed(folder: Path, change: Callable[[forms.Metadata], None]) -> Path:
    """A checkpoint of torch.distributed with `w`, its metadata changed."""
    target = folder / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"w": torch.arange(4.0)}, checkpoint_id=target, no_dist=True)
    path = target / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return target


def with_chunks(
    places: Iterable[tuple[int, int]], size: int
) -> Callable[[forms.Metadata], None]:
    """Pieces of `w` at these places, all with its four numbers as their data."""

    def change(metadata: forms.Metadata) -> None:
        form = metadata.state_dict_metadata["w"]
        assert isinstance(form, forms.TensorStorageMetadata)
        (stored,) = metadata.storage_data.values()
        form.size = torch.Size([size])
        form.chunks = [
            forms.ChunkStorageMetadata(torch.Size([at]), torch.Size([num]))
            for at, num in places
        ]
        metadata.storage_data = {
            forms.MetadataIndex("w", torch.Size([at]), i): stored
            for i, (at, _) in enumerate(places)
        }

    return change


@pytest.mark.parametrize(
    ("places", "size", "words"),
    [
        ([(0, 4)], 6, "w: its pieces leave a hole of 2 of its 6 elements"),
        ([(0, 4), (2, 4)], 8, r"w: the piece at \[2\] overlaps another"),
        ([(0, 4), (0, 4)], 8, r"w: the piece at \[0\] overlaps another"),
        ([(-4, 4), (0, 4)], 6, r"w: the piece at \[0\] overlaps another"),
        ([(0, 3)], 3, r"w: the piece at \[0\] is .*4.*, and should be .*3"),
        ([(6, 4)], 8, "w: RuntimeError"),
        ([], 4, "w: its pieces leave a hole of 4"),
    ],
)
def test_pieces_that_do_not_make_a_whole(
    places: list[tuple[int, int]], size: int, words: str, tmp_path: Path
) -> None:
    """Uninitialised memory must never become weights, though the count is right."""
    source = distributed(tmp_path, with_chunks(places, size))
    refused(source, words)


def test_pieces_that_make_a_whole(tmp_path: Path) -> None:
    """In any order."""
    source = distributed(tmp_path, with_chunks([(4, 4), (0, 4)], 8))
    path = hocket.checkpoint.import_weights(source, tmp_path / "run")
    assert hocket.checkpoint.read_weights(path)["w"].tolist() == [0, 1, 2, 3] * 2


def samples() -> list[tuple[str, bytes]]:
    """A small file in each form, with its suffix."""
    state = {"layer": {"w": torch.arange(6.0), "b": torch.ones(2, dtype=torch.int64)}}
    content = io.BytesIO()
    torch.save(state, content)
    old = io.BytesIO()
    torch.save(state, old, _use_new_zipfile_serialization=False)
    from safetensors.torch import save

    return [
        (".pt", content.getvalue()),
        (".bin", old.getvalue()),
        (".safetensors", save(state["layer"])),
    ]


SAMPLES = samples()


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_damage_is_refused_in_one_way(data: st.DataObject, tmp_path: Path) -> None:
    """Bytes changed, cut off or put in: imported, or an error that names the file."""
    suffix, content = data.draw(st.sampled_from(SAMPLES))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = rng.randrange(len(damaged))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                damaged[at] ^= 1 << rng.randrange(8)
            case "cut":
                del damaged[at : at + rng.randrange(1, 20)]
            case _:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 20))
    source = tmp_path / f"m{suffix}"
    source.write_bytes(damaged)
    assert_imported_or_refused(source)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    values=st.recursive(
        st.none() | st.integers() | st.text(max_size=4) | st.just(torch.ones(2)),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(st.text(max_size=4) | st.integers(), x, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_values_are_imported_or_refused(values: Any, tmp_path: Path) -> None:
    """Whatever torch saves, with any text as a name."""
    source = torch_file(tmp_path, values)
    assert_imported_or_refused(source)


def test_a_record_that_is_too_short(tmp_path: Path) -> None:
    """As left by a copy that broke off and was packed again."""
    content = io.BytesIO()
    torch.save({"w": torch.arange(1000.0)}, content)
    with (
        zipfile.ZipFile(content) as whole,
        zipfile.ZipFile(tmp_path / "m.pt", "w") as cut,
    ):
        for name in whole.namelist():
            data = whole.read(name)
            cut.writestr(name, data[:40] if name.endswith("data/0") else data)
    refused(tmp_path / "m.pt", "record size")
