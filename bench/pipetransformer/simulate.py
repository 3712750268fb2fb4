"""Simulate PipeTransformer's experiments, and keep what `hocket bench` shows.

    python -m bench.pipetransformer.simulate

takes seconds. What bench/freezing measured is shown with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.freezing.table import forwards
from bench.freezing.table import measured as measured_rows
from bench.pipetransformer.caching import CachingRow, caching_rows, logged_copies
from bench.pipetransformer.experiments import (
    ALL,
    CIFAR100,
    IMAGENET,
    SQUAD,
    Modules,
    Task,
    baseline,
    frozen_blocks,
    our_run,
    published_run,
)
from bench.pipetransformer.layouts import (
    FORWARD_BATCHES,
    PUBLISHED_FORWARD_S,
    LayoutRow,
    forward_s,
    layout_rows,
)
from bench.published import Row, Table, kept, write_published

RESULTS: Final = Path(__file__).parents[1] / "freezing" / "results"
MEASURED: Final = RESULTS / "cpu.json"
FORWARD: Final = RESULTS / "forward.json"
_FROZEN_FORWARD: Final = "forward of a frozen model"
_FIRST: Final = (
    "Times as fast as GPipe + DDP (8 stages x 2 replicas) without freezing, on two "
    "hosts of eight Quadro RTX 5000. published: the authors' table and figures. "
    "simulated: PipeTransformer as released, networks counted by hand in float32. "
    "hocket: the fastest shape that fits, with exact cuts and a batch that stays as "
    "large as GPipe's, while PipeTransformer's grows up to eight times; no cache; "
    "nothing frozen: what its shape alone brings. stages: PipeTransformer's, by epoch. "
    "Caveats: the published row of CIFAR-100 (2.44) has the accuracy of alpha 1/5 and "
    "the minutes of 1/3 (2.83); only alpha 1/5 keeps the accuracy. ImageNet's baseline "
    "is 26 h 30 min there, and 20 h 36 min in the authors' own notes, which makes 1.86 "
    "of 2.27 without cache. What storing kept outputs takes is left out, see below. "
    "SQuAD's 2.10 cannot be found again: the released schedule counts 12 "
    "layers of 24 and never shortens the pipeline, and with 24 only the last epoch."
)
_SECOND: Final = (
    "ViT-Base on CIFAR-100 with 224 x 224 pixels, on devices of one host, simulated in "
    "float32: 1xN is DDP, others are GPipe + DDP. Memory is that of the fullest "
    "device, of 16 GiB less a share for the driver."
)
_THIRD: Final = (
    "Forward of a wholly frozen ViT-Base on one Quadro RTX 5000, which the released "
    "code runs before each step where nothing is cached. published: its README."
)
_FORWARD: Final = (
    "The nets of bench/freezing with all blocks frozen, on one thread, in turn: the "
    "forward in eval mode without gradients, and reading what its last block gives "
    "from hocket.Cache. times as fast: reading from memory, and from disk."
)
_CACHING: Final = (
    "Samples per second with AutoCache from the first frozen block on, beside none, by "
    "epoch; PipeTransformer as released otherwise. published (figure 12, which says "
    "neither data nor alpha): slower until about epoch 4, clearly faster from 5. What "
    "storing an output takes is not published: it follows here from the throughput of "
    "a logged run, as does reading ({store:.2f} and {read:.2f} s for 320 images). "
    "At alpha 1/5, that gives the figure. With it, the first table's speedups would be "
    "too low (CIFAR-100: {least:.2f} to {most:.2f}): in those runs storing was cheaper."
)
_MEASURED: Final = (
    "Ten epochs at alpha 1/5 on two CPU workers, GPipe's order. run: with changes of "
    "the layout; times as fast: as GPipe without freezing. See bench/freezing."
)
_HEAD: Final[Row] = (
    *("task", "alpha", "modules", "published", "simulated", "hocket", "no cache"),
    *("nothing frozen", "stages"),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published number.

    Args:
        task: what was trained.
        alpha: of the schedule, as it is written.
        modules: what was on.
        published: times as fast as the baseline.
        num_blocks: that the schedule counts; the model's when not given.
        note: of the row.
    """

    task: Task
    alpha: str
    modules: Modules
    published: float
    num_blocks: int | None = None
    note: str = "all"


EXPERIMENTS: Final = (
    Experiment(
        IMAGENET, "1/3", Modules(False, False, False), 0.95, note="freezing only"
    ),
    Experiment(IMAGENET, "1/3", Modules(True, False, True), 1.26, note="no replicas"),
    Experiment(IMAGENET, "1/3", Modules(True, True, False), 2.27, note="no cache"),
    Experiment(IMAGENET, "1/3", ALL, 2.83),
    Experiment(CIFAR100, "1/2", ALL, 3.86),
    Experiment(CIFAR100, "2/5", ALL, 3.29),
    Experiment(CIFAR100, "1/3", ALL, 2.83),
    Experiment(CIFAR100, "1/4", ALL, 2.44),
    Experiment(CIFAR100, "1/5", ALL, 2.04),
    Experiment(SQUAD, "1/3", ALL, 2.10, 12, "as released"),
    Experiment(SQUAD, "1/3", ALL, 2.10, 24, "24 layers"),
)


def rows() -> Iterator[dict[str, Any]]:
    """Simulate all experiments."""
    for x in EXPERIMENTS:
        top, bottom = map(int, x.alpha.split("/"))
        frozen = frozen_blocks(x.task, top / bottom, x.num_blocks)
        base_s = baseline(x.task)
        theirs = [*published_run(x.task, frozen, x.modules)]
        plain = Modules(caches=False)
        yield {
            "task": x.task.name,
            "alpha": x.alpha,
            "modules": x.note,
            "published": x.published,
            "baseline_s": base_s,
            "frozen": frozen,
            "stages": [epoch.num_stages for epoch in theirs],
            "simulated": _ratio(base_s, theirs),
            "hocket": _ratio(base_s, our_run(x.task, frozen)),
            "hocket_no_cache": _ratio(base_s, our_run(x.task, frozen, plain)),
            "hocket_unfrozen": _ratio(base_s, our_run(x.task, [0] * len(frozen))),
        }


def _ratio(base_s: float, epochs: Any) -> float:
    return float(base_s / sum(epoch.seconds for epoch in epochs))


def _cells(row: dict[str, Any]) -> Row:
    names = "published", "simulated", "hocket", "hocket_no_cache", "hocket_unfrozen"
    return (
        *(row[name] for name in ("task", "alpha", "modules")),
        *(f"{row[name]:.2f}" for name in names),
        " ".join(map(str, row["stages"])),
    )


def _layout_table(layouts: Sequence[LayoutRow]) -> Table:
    head = (
        "devices",
        "layout",
        "batch",
        "microbatches",
        "memory",
        "images/s",
        "10 epochs",
    )
    cells = [
        (
            str(x.num_devices),
            x.layout,
            str(x.batch_size),
            str(x.num_microbatches),
            f"{x.most_bytes / 2**30:.1f} GiB",
            f"{x.images_per_s:.0f}" if x.fits else "does not fit",
            f"{x.training_s / 60:.0f} min" if x.fits else "-",
        )
        for x in layouts
    ]
    title = ["DDP beside a pipeline and DDP, simulated:"]
    return {"title": title, "rows": [head, *cells], "legend": _SECOND}


def _forward_table() -> Table:
    cells = [
        (
            str(size),
            f"{forward_s(size) * 1e3:.0f} ms",
            f"{PUBLISHED_FORWARD_S[size] * 1e3:.0f} ms"
            if size in PUBLISHED_FORWARD_S
            else "-",
        )
        for size in FORWARD_BATCHES
    ]
    return {
        "title": ["The forward alone of a frozen model:"],
        "rows": [("images", "simulated", "published"), *cells],
        "legend": _THIRD,
    }


def _caching_table(found: Sequence[CachingRow]) -> Table:
    epochs = [f"epoch {e}" for e in range(1, len(found[0].frozen))]
    head = ("alpha", "task", *epochs, "slower until", "clearly faster from")
    cells = [
        (
            row.alpha,
            row.task,
            *(f"{x:.2f}" for x in row.times_as_fast[1:]),
            str(row.slower_until),
            str(row.clearly_faster_from),
        )
        for row in found
    ]
    copies, num_bytes = logged_copies(), CIFAR100.batch_size * CIFAR100.kept_bytes
    alphas = (1 / 5, 1 / 2)
    least, most = (
        _ratio(
            baseline(CIFAR100),
            published_run(CIFAR100, frozen_blocks(CIFAR100, alpha), ALL, copies),
        )
        for alpha in alphas
    )
    legend = _CACHING.format(
        read=copies.read_s * num_bytes,
        store=copies.store_s * num_bytes,
        least=least,
        most=most,
    )
    title = ["Caching from epoch 0, simulated:"]
    return {"title": title, "rows": [head, *cells], "legend": legend}


def read_measured() -> dict[str, Any]:
    """Read what bench/freezing has measured last."""
    return {**kept(MEASURED), _FROZEN_FORWARD: kept(FORWARD)}


def main() -> None:
    """Simulate all, and write them beside what was measured."""
    found = [*rows()]
    layouts, caching = [*layout_rows()], [*caching_rows()]
    tables: list[Table] = [
        {
            "title": ["PipeTransformer's experiments on 16 GPUs, simulated:"],
            "rows": [_HEAD, *map(_cells, found)],
            "legend": _FIRST,
        },
        _caching_table(caching),
        _layout_table(layouts),
        _forward_table(),
    ]
    measured = read_measured()
    alone = measured[_FROZEN_FORWARD]
    title = f"The forward alone of frozen models, measured, {_where(alone)}:"
    tables.append(_plain_table(title, forwards(alone["rows"]), _FORWARD))
    title = f"Measured on two CPU workers, {_where(measured)}; medians of rounds:"
    tables.append(_plain_table(title, measured_rows(measured["rows"]), _MEASURED))
    alone_s = [{"images": x, "forward_s": forward_s(x)} for x in FORWARD_BATCHES]
    experiments = {
        "speedups": found,
        "caching from epoch 0": [asdict(x) for x in caching],
        "layouts": [asdict(x) for x in layouts],
        _FROZEN_FORWARD: alone_s,
    }
    named = ({"experiment": name, "rows": x} for name, x in experiments.items())
    write_published("pipetransformer", named, measured, tables)


def _where(measured: dict[str, Any]) -> str:
    where = measured["environment"]
    return (
        f"{where['date']}, {where['num_cores']} cores of {where['processor']}, torch "
        f"{where['torch']}"
    )


def _plain_table(title: str, rows: Sequence[Sequence[str]], legend: str) -> Table:
    """Return a table without Markdown's marks."""
    plain = [
        tuple(cell.replace("**", "").replace("–", "-") for cell in row) for row in rows
    ]
    return {"title": [title], "rows": plain, "legend": legend}


if __name__ == "__main__":
    main()
