"""What the page of a run compares: as many predicted steps as were measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hocket.core.costs import Costs
from hocket.core.simulate import simulate
from hocket.recipes.training.loop import epoch_table, predicted_beside
from hocket.recipes.training.records import numbers_of
from hocket.recipes.training.report import charts, stage_rows
from hocket.schedules import make_schedule
from tests.recipes.support.run_records import (
    epoch_record,
    evaluation_record,
    step_record,
)


def test_overlapping_steps_are_predicted_as_often_as_they_were_measured() -> None:
    """A plan's few steps beside a segment of more would show nothing."""
    order = make_schedule("wpipe", num_devices=2, num_microbatches=2, num_steps=6)
    costs = Costs.uniform()
    plan: Any = SimpleNamespace(  # of a plan, only what is read
        schedule=order, costs=costs, predicted=simulate(order, costs)
    )
    assert predicted_beside(plan, None) is plan.predicted
    assert predicted_beside(plan, simulate(order, costs)) is plan.predicted
    measured = simulate(order.with_num_steps(9), costs)
    beside = predicted_beside(plan, measured)
    assert beside.schedule == measured.schedule
    assert beside.makespan_s == measured.makespan_s


def test_epochs_have_their_rates() -> None:
    """Samples, reductions and bytes per second of the epoch; layouts and parameters."""
    epoch = numbers_of(epoch_record())
    unknown = {"ring_bytes_per_s": None, "link_bytes_per_s": None}
    table = epoch_table([epoch | {"ring_bytes_per_s": None}, epoch])
    assert "ring MB/s" in epoch_table([epoch]).head
    assert {"ring MB/s", "link MB/s"}.isdisjoint(epoch_table([epoch | unknown]).head)
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["devices x replicas"] == "2x1"
    assert (row["active parameters"], row["frozen parameters"]) == ("600", "400")
    assert (row["samples/s, waits included"], row["reductions/s"]) == ("8.0", "2.0")
    assert (row["MB reduced/s"], row["MB sent/s"]) == ("4.0", "1.0")
    assert (row["link MB/s"], row["ring MB/s"]) == ("1,000", "–")
    assert (row["cache s"], row["transition s"]) == ("0.12", "0.50")
    assert "all-reduce s" not in row  # what is zero in all epochs


def test_a_delayed_stage_is_named() -> None:
    """Who reads the page sees which layers read old weights."""
    order = make_schedule("wpipe", num_devices=2, num_microbatches=2)
    plan: Any = SimpleNamespace(schedule=order, stage_names=("a", "b", "c", "d"))
    assert [reported for _, reported in stage_rows(plan)] == [
        "device 0, from a, delay 1",
        "device 1, from b, delay 1",
        "device 0, from c",
        "device 1, from d",
    ]


def test_curves_are_those_of_the_metrics_file() -> None:
    """Loss, metrics, speed and bubble; what was not finite leaves a gap."""
    steps = [numbers_of(step_record(i, seconds=i + 0.5)) for i in range(3)]
    steps[1]["loss"] = None
    loss, *others = charts(steps, [numbers_of(evaluation_record(2))])
    training, evaluation = loss.lines
    assert training.finite_values() == [1.0, None, 1.0]
    assert (evaluation.steps, evaluation.values) == ((2.0,), (0.75,))
    assert evaluation.is_evaluation
    titles = ["accuracy", "bits_per_byte", "samples/s of each step"]
    assert [chart.title for chart in others][:3] == titles
    assert others[0].lines[0].values == (0.5,)
    assert others[2].lines[0].values == (16.0, 8 / 1.5, 3.2)
    assert len(charts([], [])) == 3
