"""A recipe's schedule may be a file: torch's CSV, or hocket's text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hocket.errors import RecipeError
from hocket.passes.add_gathers import add_gathers
from hocket.recipes.config.resolve import resolve
from hocket.schedules import make_schedule

ORDER = make_schedule("zb-v", num_devices=2, num_microbatches=4)


def resolved(schedule: str, *more: str) -> str:
    """What the recipe says of its schedule, with two workers and four microbatches."""
    settings = [
        f"pipeline.schedule={schedule}",
        "pipeline.num_microbatches=4",
        "pipeline.num_workers=2",
        *more,
    ]
    return resolve("digits-vit", settings).recipe.pipeline.schedule


def test_takes_both_kinds_of_file(free_dir: Path) -> None:
    """With replicas, too, of which CSV knows nothing."""
    ORDER.to_csv("order.csv")
    Path("orders").mkdir()
    Path("orders/zb-v").write_text(str(ORDER))

    assert resolved("order.csv") == "order.csv"
    assert resolved("./orders/zb-v") == "./orders/zb-v"
    more = ("pipeline.num_workers=4", "pipeline.num_replicas=2")
    assert resolved("order.csv", *more) == "order.csv"


def test_takes_orders_of_sharded_stages(free_dir: Path) -> None:
    """With gathers of their own, or a CSV without; the text says how many shards."""
    ORDER.to_csv("order.csv")
    sharded = make_schedule("zb-v", num_devices=2, num_microbatches=4, num_shards=2)
    sharded.to_csv("sharded.csv")
    Path("sharded.txt").write_text(str(add_gathers(sharded, "op")))
    Path("whole.txt").write_text(str(ORDER))

    more = ("pipeline.num_workers=4", "pipeline.num_shards=2")
    for name in ("order.csv", "sharded.csv", "sharded.txt"):
        assert resolved(name, *more) == name
    with pytest.raises(RecipeError, match=r"1 shards, not 2 \(num_shards\)"):
        resolved("whole.txt", *more)
    with pytest.raises(RecipeError, match="2 shards, not 1"):
        resolved("sharded.txt")


def test_takes_an_order_whose_steps_overlap(free_dir: Path) -> None:
    """It has several steps, as its body has to repeat; without one it is too long."""
    order = make_schedule("wpipe", num_devices=2, num_microbatches=4, num_steps=4)
    Path("own.txt").write_text(str(order))
    Path("long.txt").write_text(str(replace(order, body=(), num_repeats=1)))

    assert resolved("own.txt") == "own.txt"
    with pytest.raises(RecipeError, match="4 steps, not 1"):
        resolved("long.txt")


def test_looks_at_the_file_before_anything_begins(free_dir: Path) -> None:
    """Its sizes, its cells, and whether it may run at all."""
    ORDER.to_csv("order.csv")
    Path("short.csv").write_text("0F0,0F1,0I0\n")
    Path("stuck.txt").write_text("d0  0F0 0B0 0U\nd1  1B0 1F0 1U\n")
    reasons = {
        "none.csv": "none.csv: cannot be read: No such file",
        "short.csv": "short.csv, line 1, cell 3: for microbatch 0, stage 0 has 0F0 0I0",
    }
    for name, reason in reasons.items():
        with pytest.raises(RecipeError, match=f"pipeline.schedule: {reason}"):
            resolved(name)
    with pytest.raises(RecipeError, match="4 microbatches, not 8"):
        resolved("order.csv", "pipeline.num_microbatches=8")
    with pytest.raises(RecipeError, match="no lane can move"):
        resolved("stuck.txt", "pipeline.num_microbatches=1")


def test_a_cut_must_fit_the_file(free_dir: Path) -> None:
    """Four stages begin with three modules."""
    ORDER.to_csv("order.csv")
    with pytest.raises(RecipeError, match="names 1 modules; the schedule has 4 stages"):
        resolved("order.csv", "pipeline.cut=['blocks.3']")
