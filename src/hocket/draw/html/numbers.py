"""Make the tables of a page: each timeline's numbers, and their differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hocket.core.timelines.idle import Cause
from hocket.draw.html.content import Table
from hocket.draw.layout import Titled
from hocket.draw.quantity import byte_size, percent, seconds, short
from hocket.draw.summary import Summary, summarize
from hocket.draw.where import MEANINGS as CAUSES
from hocket.draw.where import Where

_Summaries = Sequence[Summary]
Row = tuple[str, ...]

MEANINGS: Final = {
    "makespan": "from the start of the first op to the end of the last one",
    "time per step": "the makespan, divided by the number of steps",
    "bubble": "the share of the makespan in which a lane does not work: the mean over "
    "lanes",
    "bubble, steady": "the same while the pipeline is full: after the end of warm-up, "
    "and before the pipeline begins to drain",
    "peak memory of a device": "the most bytes alive at once on the device that holds "
    "most",
    "peak activations, microbatches": "how many microbatches have left activations "
    "for their backward: the most at once on a device, counted in shares of its "
    "stages",
    "sent over links": "bytes from device to device, reductions not among them",
    **{cause.value: meaning for cause, meaning in CAUSES.items()},
}


def idle_table(timelines: Sequence[Titled], wheres: Sequence[Where]) -> Table:
    """Return the idle time of each timeline by cause: shares of its makespan."""
    names = [title or timeline.origin.value for title, timeline in timelines]
    heads = (*names, "difference") if len(names) == 2 else tuple(names)
    rows = []
    for cause in Cause:
        shares = [where.idle.fractions[cause] for where in wheres]
        if any(percent(share) != "0 %" for share in shares):
            rows.append(_row(cause.value, shares, percent, _points))
    return Table("", ("idle because of", *heads), tuple(rows))


def number_tables(
    timelines: Sequence[Titled], samples_per_step: float | None
) -> tuple[Table, Table]:
    """Return two tables: one of whole timelines, one of each lane.

    Where there are two timelines, the last column is the second compared with the
    first.
    """
    summaries = [summarize(timeline) for _, timeline in timelines]
    names = [title or timeline.origin.value for title, timeline in timelines]
    heads = (*names, "difference") if len(names) == 2 else tuple(names)
    whole = Table("", ("", *heads), tuple(_whole(summaries, samples_per_step)))
    return whole, _lanes(timelines, summaries, heads)


def _whole(numbers: _Summaries, samples_per_step: float | None) -> Iterator[Row]:
    yield _row("makespan", [n.makespan_s for n in numbers], seconds, _ratio)
    yield _row("time per step", [n.step_s for n in numbers], seconds, _ratio)
    unit = "steps" if samples_per_step is None else "samples"
    per_step = 1.0 if samples_per_step is None else samples_per_step
    rates = [per_step / n.step_s if n.step_s else 0.0 for n in numbers]
    yield _row(f"throughput, {unit}/s", rates, short, _ratio)
    yield _row("bubble", [n.bubble for n in numbers], percent, _points)
    yield _row("bubble, steady", [n.steady_bubble for n in numbers], percent, _points)
    if any(n.peak_bytes for n in numbers):
        peaks = [max(n.peak_bytes, default=0.0) for n in numbers]
        yield _row("peak memory of a device", peaks, _known_bytes, _ratio)
    activations = [max(n.peak_activations) for n in numbers]
    yield _row("peak activations, microbatches", activations, short, _ratio)
    if any(n.sent_bytes for n in numbers):
        sent = [float(n.sent_bytes) for n in numbers]
        yield _row("sent over links", sent, _known_bytes, _ratio)


def _lanes(timelines: Sequence[Titled], summaries: _Summaries, heads: Row) -> Table:
    """Return a row per lane of any timeline: its bubble, and its device's memory."""
    knows_bytes = any(summary.peak_bytes for summary in summaries)
    text = _known_bytes if knows_bytes else short
    head = ["lane", *(f"bubble, {name}" for name in heads)]
    head += [f"{'memory' if knows_bytes else 'activations'}, {name}" for name in heads]
    devices = {
        lane.label: lane.device
        for _, timeline in timelines
        for lane in timeline.schedule.lanes
    }
    rows = []
    for label, device in devices.items():
        bubbles = [dict(summary.lane_bubbles).get(label) for summary in summaries]
        peaks = [_peak(summary, device, knows_bytes) for summary in summaries]
        cells = _row(label, bubbles, percent, _points)
        rows.append((*cells, *_row("", peaks, text, _ratio)[1:]))
    return Table("Each lane", tuple(head), tuple(rows), is_open=len(rows) <= 8)


def _peak(summary: Summary, device: int, knows_bytes: bool) -> float | None:
    peaks = summary.peak_bytes if knows_bytes else summary.peak_activations
    return peaks[device] if device < len(peaks) else None


def _row(
    name: str,
    amounts: Sequence[float | None],
    text: Callable[[float], str],
    difference: Callable[[float, float], str],
) -> Row:
    texts = ["–" if amount is None else text(amount) for amount in amounts]
    if len(amounts) != 2:
        return (name, *texts)
    first, second = amounts
    if first is None or second is None or "–" in texts:
        return (name, *texts, "–")
    return (name, *texts, difference(first, second))


def _known_bytes(amount: float) -> str:
    return byte_size(amount) if amount else "–"


def _ratio(first: float, second: float) -> str:
    if not first:
        return "–"
    return _signed(100 * (second / first - 1), "%")


def _points(first: float, second: float) -> str:
    return _signed(100 * (second - first), "points")


def _signed(number: float, unit: str) -> str:
    text = f"{number:+.1f}".replace("-", "−")
    return f"0 {unit}" if text in ("+0.0", "−0.0") else f"{text} {unit}"
