"""BERT on MRPC, order beside order: what is measured, on files that the test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from bench.in_turn import Order
from bench.ooo_pipeline.measure import ENTRY, ORDERS, PLAIN, measure
from hocket.errors import DataError
from hocket.schedules import SCHEDULES
from tests.run.support.forked import answers_of

TINY: Final = (
    "model.width=16",
    "model.num_blocks=4",
    "model.num_heads=2",
    "model.mlp_width=16",
    "model.dropout=0.0",
    "data.num_tokens=8",
    "data.num_pieces=100",
    "training.batch_size=8",
    "training.max_steps=5",
    "pipeline.num_microbatches=4",
)
WORDS: Final = ("the", "cat", "sat", "on", "mat", "and", "dog", "ate", "his", "food")


def mrpc(folder: Path) -> Path:
    """A folder as GLUE has it, of 40 and 8 pairs."""
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for name, num_pairs in (("train", 40), ("dev", 8)):
        lines = [header] + [
            f"{i % 2}\t{i}\t{i}\t{WORDS[i % 10]} {WORDS[i % 7]}\t{WORDS[i % 9]}"
            for i in range(num_pairs)
        ]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.long
@pytest.mark.timeout(150)
def test_every_order_trains_alike_and_is_compared_with_gpipe(tmp_path: Path) -> None:
    """The same loss after the same steps; GPipe beside itself is 1.

    Without dropout, for what is drawn depends on the cut.
    """
    orders = [["gpipe", 1], ["ooo-fast-forward", 1], ["ooo-modulo", 2]]
    data = mrpc(tmp_path)
    found, _ = answers_of(
        ENTRY,
        [f"data.path={data}", *TINY],
        orders,
        str(tmp_path / "run"),
        folder=tmp_path / "job",
        whole_s=140.0,
    )
    plain, fast, modulo = found["rows"]

    assert found["num_rounds"] == 3
    assert plain["times_as_fast"]["of_medians"] == 1.0
    assert plain["simulated_times_as_fast"] == plain["ideal_times_as_fast"] == 1.0
    assert fast["ideal_times_as_fast"] == pytest.approx(15 / 13, abs=1e-4)
    assert modulo["ideal_times_as_fast"] == pytest.approx(15 / 12.5, abs=1e-4)
    for row in (fast, modulo):
        assert row["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-5)
    assert all(row["step"]["median_ms"] > 0 for row in found["rows"])


def test_the_orders_are_those_of_the_question() -> None:
    """GPipe first, then 1F1B, out-of-order backprop's and the zero-bubble ones."""
    names = [order.schedule for order in ORDERS]
    wanted = {"gpipe", "1f1b", "ooo-fast-forward", "ooo-modulo", "zb-h1", "zb-h2"}

    assert ORDERS[0] == PLAIN == Order("gpipe")
    assert wanted <= set(names) <= set(SCHEDULES)


def test_missing_data_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    """Before any worker starts."""
    with pytest.raises(DataError, match=r"train\.tsv.*gluebenchmark\.com"):
        measure(tmp_path)
