"""Old weights by name and age: what is taken of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import DamagedError
from hocket.run.checkpoint.commit import SaveJob, commit
from hocket.run.checkpoint.export import open_one
from hocket.run.checkpoint.format.manifest import Section
from hocket.run.checkpoint.format.opened import read_tensors
from hocket.run.checkpoint.stale_weights import (
    by_age,
    names_by_age,
    old_places,
    stored_names,
)
from tests.run.checkpoint.made import alone, run_of, save_by_two, share_of

counts = st.integers(0, 5)


@given(num=counts)
def test_names_come_back_the_oldest_first(num: int) -> None:
    """Whatever else is there, also of weights with such a name."""
    named = dict(by_age("a", [torch.tensor(float(i)) for i in range(num)]))
    others = dict(by_age("a/1", [torch.zeros(())]))
    found = names_by_age({**others, **named}, "a")
    assert [named[name].item() for name in found] == list(range(num))


@given(there=counts, num=counts)
def test_as_many_as_a_stage_reads(there: int, num: int) -> None:
    """The youngest ones; the oldest stands in for what is older than it; or nothing.

    As training begins: with a delay of d, step t reads the weights after
    `max(0, t - d)` updates.
    """
    known = {f"w/{age}" for age in range(1, there + 1)}
    found = stored_names(known, "w", num)
    if not there:
        assert found == []
        return
    assert found == [f"w/{min(age, there)}" for age in range(num, 0, -1)]


def test_what_is_taken_is_read_by_name(tmp_path: Path) -> None:
    """Of each weight as many as its stage wants; nothing of one that has none."""
    save_by_two(tmp_path, 4)
    opened = open_one(tmp_path)
    names = {"layers.0.weight": "layers.0.weight", "layers.0.bias": "layers.0.bias"}
    locations = old_places(opened, names, {"layers.0.weight": 1, "layers.0.bias": 1})
    assert list(locations) == ["layers.0.weight/1"]
    [tensor] = read_tensors(locations).values()
    assert torch.equal(tensor, torch.full((5, 3), 4.0))


def test_an_old_weight_of_another_form_is_damage(tmp_path: Path) -> None:
    """Found while nothing has been changed yet."""
    share = share_of(1)
    share.tensors[Section.OLD]["layers.0.weight/1"] = torch.zeros(7)
    opened = open_one(
        commit(SaveJob(tmp_path, run_of(1), None), lambda: share, alone())
    )
    names = {"layers.0.weight": "layers.0.weight"}
    with pytest.raises(DamagedError, match=r"layers\.0\.weight/1 has another shape"):
        old_places(opened, names, {"layers.0.weight": 2})
