"""What was measured of freezing, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from statistics import fmean, median, pstdev
from typing import Any

from bench.freezing.cases import BASE

Row = dict[str, Any]
_HEAD = (
    *("case", "contestant", "stages x replicas : frozen, by epoch", "steps"),
    *("run", "fastest to slowest", "times as fast", "without transitions"),
    *("transitions", "accuracy", "cache hits"),
)


def measured(rows: list[Row]) -> list[list[str]]:
    """Every contestant of every case, beside GPipe without freezing."""
    return [
        [*_HEAD],
        *(
            cells
            for row in rows
            for cells in (_cells(row, *x) for x in row["contestants"].items() if x[1])
        ),
    ]


def qualities(rows: list[Row]) -> list[list[str]]:
    """Accuracy of each policy, beside that of the same seeds without freezing."""
    table = [["case", "policy", "frozen layers, by epoch", "accuracy", "difference"]]
    for row in rows:
        runs = list(row["policies"].items())
        base = [x["accuracy"] for x in runs[0][1].values()]
        for name, by_seed in runs:
            found = [*by_seed.values()]
            own = [x["accuracy"] for x in found]
            apart = [100 * (a - b) for a, b in zip(own, base, strict=True)]
            frozen = " ".join(str(number) for _, number in found[0]["epochs"])
            cells = [row["case"], name, frozen, _spread([100 * x for x in own])]
            table.append([*cells, "–" if name == runs[0][0] else _spread(apart)])
    return table


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.1f} ± {pstdev(values):.1f} %"


def forwards(rows: list[Row]) -> list[list[str]]:
    """The forward alone of each wholly frozen net, beside reading its outputs."""
    head = ["net", "batch", "computed", "images/s", "read from memory"]
    return [
        [*head, "read from disk", "times as fast", "kept of a sample"],
        *(
            [
                row["case"],
                str(row["batch_size"]),
                *_forward_cells(row),
                f"{row['bytes_per_sample'] / 1e3:.1f} kB",
            ]
            for row in rows
        ),
    ]


def _forward_cells(row: Row) -> list[str]:
    computed, memory, disk = (
        row[name]["median_ms"]
        for name in ("computed", "read from memory", "read from disk")
    )
    return [
        f"{computed:.0f} ms",
        f"{1e3 * row['batch_size'] / computed:,.0f}",
        f"{memory:.1f} ms",
        f"{disk:.1f} ms",
        f"**{computed / memory:.0f}**, {computed / disk:.0f}",
    ]


def steps_s(ran: Row) -> float:
    """Seconds of a run's steps, without changes of the layout."""
    return float(ran["seconds"] - sum(ran.get("transitions_s", ())))


def times_as_fast(row: Row, name: str) -> float:
    """A contestant's whole runs beside the base's of the same rounds; their median."""
    return median(base["seconds"] / ran["seconds"] for base, ran in _pairs(row, name))


def _pairs(row: Row, name: str) -> list[tuple[Row, Row]]:
    """Return the base's and a contestant's runs of the same rounds."""
    base = row["contestants"].get(BASE, {})
    runs = row["contestants"][name].items()
    return [(base[number], ran) for number, ran in runs if number in base]


def _cells(row: Row, name: str, by_round: Row) -> list[str]:
    runs = [*by_round.values()]
    seconds = [x["seconds"] for x in runs]
    cells = [
        row["case"],
        name,
        _layouts(runs[0]["epochs"]),
        f"{median(map(steps_s, runs)):.2f} s",
        f"{median(seconds):.2f} s",
        f"{min(seconds):.2f} to {max(seconds):.2f}",
    ]
    if pairs := _pairs(row, name):
        plain = median(steps_s(base) / steps_s(ran) for base, ran in pairs)
        cells += [f"**{times_as_fast(row, name):.2f}**", f"{plain:.2f}"]
    else:
        cells += ["–", "–"]
    return [*cells, _transitions(runs), *_quality(runs)]


def _layouts(epochs: list[list[Any]]) -> str:
    """Return `2x1: 0 | 1x2: 3 5 6`."""
    groups = groupby(epochs, key=lambda epoch: epoch[0])
    return " ; ".join(
        f"{shape}: {' '.join(str(frozen) for _, frozen in group)}"
        for shape, group in groups
    )


def _transitions(runs: list[Row]) -> str:
    every = [x for ran in runs for x in ran["transitions_s"]]
    if not every:
        return "none"
    number = len(every) / len(runs)
    return f"{number:.0f}, {median(every):.2f} s, at most {max(every):.2f} s"


def predicted(rows: list[Row]) -> list[list[str]]:
    """Predictions of all runs: the median over rounds, and the least and the most."""
    head = ["case", "contestant", "steps", "predicted", "error", "at its speed"]
    head += ["after the first epoch", "after half of them", "epoch by epoch"]
    return [head, *(x for row in rows for x in _predictions(row))]


def _predictions(row: Row) -> Iterator[list[str]]:
    for name, by_round in row["contestants"].items():
        runs = [ran for ran in by_round.values() if "ends_s" in ran]
        if not runs:
            continue
        taken_s = median(map(steps_s, runs))
        expected_s = median(ran["predicted_s"] for ran in runs)
        errors = map(_error, zip(*map(_errors, runs), strict=True))
        yield [row["case"], name, f"{taken_s:.1f} s", f"{expected_s:.1f} s", *errors]


def _errors(ran: Row) -> list[float | None]:
    """Return the relative error of each prediction of one run, None if not known."""
    whole_run_s, epochs_s = ran["seconds"], sum(ran["epochs_s"])
    pairs = (
        (ran["predicted_s"], steps_s(ran)),
        (at_its_speed_s(ran), steps_s(ran)),
        (whole_s(ran, 1), whole_run_s),
        (whole_s(ran, 5), whole_run_s),
        (followed_s(ran), epochs_s),
    )
    return [None if a is None else a / b - 1 for a, b in pairs]


def _error(by_round: Iterable[float | None]) -> str:
    known = [100 * x for x in by_round if x is not None]
    if not known:
        return "–"
    if len(known) == 1:
        return f"{known[0]:+.1f} %"
    return f"{median(known):+.1f} % ({min(known):+.1f} to {max(known):+.1f})"


def whole_s(ran: Row, num_epochs: int) -> float:
    """Return a run's seconds as they are predicted after some epochs."""
    return float(sum(ran["ends_s"][num_epochs - 1]))


def slower(ran: Row) -> list[float]:
    """Return how many times as long as before a probe took, beside each epoch.

    Before is when the pace was measured that the run is predicted by. Empty where the
    machine was not probed.
    """
    if not ran.get("known_probe_s"):
        return []
    return [fmean(x) / ran["known_probe_s"] for x in pairwise(ran["probes_s"])]


def at_its_speed_s(ran: Row) -> float | None:
    """Return a run's predicted steps at the speed that the machine had in each epoch.

    None where it was not probed.
    """
    shares = slower(ran)
    if not shares:
        return None
    return sum(a * b for a, b in zip(shares, ran["epochs_predicted_s"], strict=True))


def followed_s(ran: Row) -> float:
    """Return the seconds of a run's epochs, each predicted when it begins.

    The first as it is; the others with what the one before took longer than predicted.
    """
    predicted, took = ran["epochs_predicted_s"], ran["epochs_s"]
    late_s = [0.0, *(a - b for a, b in zip(took, predicted, strict=True))]
    return sum(a + b for a, b in zip(predicted, late_s, strict=False))


def _quality(runs: list[Row]) -> list[str]:
    if "accuracy" not in runs[0]:
        return ["–", "–"]
    found = [100 * ran["accuracy"] for ran in runs]
    hits = sum(ran["cache_hits"] for ran in runs) / len(runs)
    return [_spread(found), f"{hits:,.0f}"]
