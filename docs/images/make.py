"""Draw the pictures of the README and the documentation: `python docs/images/make.py`.

They come from the library alone, so that they are what it does; a test holds them so.
"""

from __future__ import annotations

from pathlib import Path

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.simulate import simulate
from hocket.core.timelines.timeline import Timeline
from hocket.draw import Style, to_svg
from hocket.schedules import make_schedule

HERE = Path(__file__).parent
NUM_DEVICES, NUM_MICROBATCHES = 4, 8
_ZERO_BUBBLE = ("1f1b", "zb-h1", "zb-h2")
_FLUSH_FREE = {
    "1f1b": "1f1b: flushes, one copy of the weights",
    "pipedream-2bw": "pipedream-2bw: no flush, two copies of all weights",
    "wpipe": "wpipe: two copies of the front half's weights",
    "wpipe-overlapped": "wpipe-overlapped: the same, and hops are hidden",
}


def timeline_of(
    name: str,
    num_steps: int = 1,
    update_s: float = 0.0,
    num_microbatches: int = NUM_MICROBATCHES,
    hop_s: float = 0.0,
) -> Timeline:
    """A schedule on four equal devices; a backward takes twice as long as a forward."""
    schedule = make_schedule(
        name,
        num_devices=NUM_DEVICES,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
    )
    share = StageCost(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, update_s=update_s
    )
    return simulate(schedule, Costs((share,), is_device_share=True, link=Link(hop_s)))


def pictures() -> dict[str, str]:
    """The contents of each file in this folder, by name."""
    names = ("gpipe", "1f1b", "interleaved-1f1b")
    compared = [(name, timeline_of(name)) for name in names]
    two_steps = timeline_of("1f1b", num_steps=2, update_s=0.5)
    split = [(name, timeline_of(name, num_steps=2)) for name in _ZERO_BUBBLE]
    overlapping = [
        (title, timeline_of(name, num_steps=4, num_microbatches=6, hop_s=0.25))
        for name, title in _FLUSH_FREE.items()
    ]
    return {
        "flush-free.svg": to_svg(overlapping, style=Style(show_memory=False)),
        "schedules.svg": to_svg(compared, style=Style(show_memory=False)),
        "1f1b.svg": to_svg([("1f1b", two_steps)]),
        "zero-bubble.svg": to_svg(split, style=Style(show_memory=False)),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (HERE / name).write_text(picture, encoding="utf-8")
