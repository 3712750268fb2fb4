"""Orders of sharded stages: made as those of replicas, refused early, or given."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.core.schedule import Schedule
from hocket.errors import PlanError, ShapeError
from hocket.passes.add_gathers import add_gathers, drop_gathers
from hocket.passes.add_messages import add_messages
from hocket.passes.playable_order import playable_order
from hocket.planner.gathers import with_copies
from hocket.run.cluster.layout import Layout
from hocket.run.tune.order import make_order, with_given_gathers
from hocket.schedules import make_schedule
from tests.run.tune.test_config import small_config

LAYOUT = Layout(rank=0, num_devices=2, num_replicas=1, num_shards=2)


def given(name: str = "zb-h1", num_shards: int = 2) -> Schedule:
    """An order whose stages are gathered for each op."""
    made = make_schedule(name, num_devices=2, num_microbatches=2, num_shards=num_shards)
    return playable_order(add_gathers(made, "op"))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_is_measured_as_an_order_of_replicas(name: str) -> None:
    """Sharded stages add up over as many workers; gathers come behind all else."""
    two = Layout(rank=0, num_devices=2, num_replicas=2)
    assert make_order(name, LAYOUT, 4, None) == make_order(name, two, 4, None)


@pytest.mark.parametrize("name", ["wpipe", "pipedream-2bw"])
def test_refuses_what_cannot_be_sharded(name: str) -> None:
    """Before anything is measured, with the way out."""
    with pytest.raises(PlanError, match=r"num_shards=2, but .* use num_replicas in pl"):
        make_order(name, LAYOUT, 4, None)


@pytest.mark.parametrize("suffix", ["", "txt", "csv"])
def test_gathers_of_a_given_order_are_kept(free_dir: Path, suffix: str) -> None:
    """Of an object or a file; those of torch's CSV are counted from 0."""
    source: Schedule | str = given()
    if suffix == "csv":  # which has gathers where it has messages
        add_messages(given()).to_csv("order.csv")
    else:
        Path("order.txt").write_text(str(given()))
    if suffix:
        source = f"order.{suffix}"
    order = make_order(source, LAYOUT, 2, None)
    assert order.program.num_replicas == 2
    assert str(drop_gathers(order)) == str(order)
    bare = with_copies(order, 1, 2)
    config = small_config(schedule=source)
    found = with_given_gathers(bare, config, LAYOUT)
    assert str(found) == str(given())
    assert str(add_gathers(bare)) != str(given())


def test_gathers_of_another_order_are_not_taken() -> None:
    """Such as one to which something was added, or that has none."""
    bare = with_copies(make_order("1f1b", LAYOUT, 2, None), 1, 2)
    for schedule in (given(), drop_gathers(given("1f1b")), "1f1b"):
        config = small_config(schedule=schedule)
        assert with_given_gathers(bare, config, LAYOUT) is None


def test_sizes_are_compared_by_name() -> None:
    """Whole stages are no sharded ones, though as many workers add up."""
    whole = make_schedule("1f1b", num_devices=2, num_microbatches=2, num_replicas=2)
    with pytest.raises(ShapeError, match=r"2 replicas, not 1 .*, and 1 shards, not 2"):
        make_order(whole, LAYOUT, 2, None)
    with pytest.raises(ShapeError, match=r"2 shards, not 4 \(num_shards\)"):
        make_order(given(), Layout(0, 2, 1, 4), 2, None)
