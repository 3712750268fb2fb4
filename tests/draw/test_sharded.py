"""Gathers of sharded stages in every picture."""

from __future__ import annotations

import json
from collections.abc import Callable

from hocket.core.costs import Costs, StageCost
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw.html.page import to_html
from hocket.draw.perfetto import to_perfetto
from hocket.draw.svg import to_svg
from hocket.draw.text import to_text
from hocket.schedules import make_schedule


def sharded() -> Timeline:
    """Gathers as long as an op: only those at the begin make a device wait."""
    schedule = make_schedule(
        "interleaved-1f1b",
        num_devices=2,
        num_microbatches=4,
        num_steps=2,
        num_shards=2,
    )
    each = StageCost(
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        update_s=0.5,
        unshard_s=1.0,
        whole_bytes=1 << 20,
    )
    return simulate(schedule, Costs((each,) * 4))


def test_the_picture_of_sharded_stages(golden: Callable[[str, str], None]) -> None:
    """A gather runs beside its lane; where an op waits for it, the lane is empty."""
    golden("draw/sharded.txt", to_text(sharded(), width=150) + "\n")


def test_gathers_have_their_colour_and_name() -> None:
    """In SVG and on pages, with the op as the hint."""
    svg, page = to_svg(sharded()), to_html([("sharded", sharded())])

    assert ">unshard<" in svg
    assert "0UNSHARD0 unshard, 1 s from 0 s" in svg
    # Over the ops that it runs beside, which would cover it.
    assert svg.rindex("3B3@1 backward") < svg.index("0UNSHARD0 unshard")
    assert '"UNSHARD"' in page
    assert '"RESHARD"' in page


def test_gathers_run_beside_their_lane() -> None:
    """In Perfetto each has a track of its own, as reductions do."""
    events = json.loads(to_perfetto(sharded()))["traceEvents"]
    begun = [x["name"] for x in events if x["ph"] == "b" and x["cat"] == "unshard"]

    assert [*begun] == [
        f"{s}UNSHARD0{t}" for d in (0, 1) for t in ("", "@1") for s in (d, d + 2)
    ]
