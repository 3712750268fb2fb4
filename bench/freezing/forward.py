"""The forward alone of a wholly frozen net, beside reading its outputs from the cache.

    python -m bench.freezing.forward [--data FOLDER]

One process with one thread, all in turn; it takes a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from bench.freezing.cases import CASES, LOCAL, Case
from bench.freezing.table import forwards
from bench.freezing.training import ready, use_one_thread
from bench.measure import alternate, environment, spread, write_result
from hocket.cli.shared.output import aligned
from hocket.freeze.cache.next_use import NextUse
from hocket.freeze.cache.shard import Key
from hocket.freeze.cache.store import Store
from hocket.freeze.settings import Cache
from hocket.model.trace.value import SentTensor
from hocket.run.cluster.world import World, join_world
from hocket.run.elastic.cache.output_rows import OutputRows

RESULTS: Final = Path(__file__).parent / "results" / "forward.json"
BATCH_SIZES: Final = (64, 320)
COMPUTED: Final = "computed"
IN_MEMORY: Final = "read from memory"
ON_DISK: Final = "read from disk"
_NUM_ROUNDS: Final = 9
_CPU: Final = torch.device("cpu")
_LAST_BLOCK: Final = {
    "ViT, CIFAR-10": "blocks.11",
    "BERT, SST-2": "bert.encoder.layer.11",
}


def main() -> None:
    """Measure both nets, and keep the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=LOCAL)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    use_one_thread()
    with closing(join_world()) as world:
        rows = [
            _measured(case, arguments.data, batch_size, world)
            for case in CASES.values()
            for batch_size in BATCH_SIZES
        ]
    write_result(arguments.output, {"environment": environment(), "rows": rows})
    for line in aligned(map(tuple, forwards(rows))):
        print(line)


def _measured(case: Case, data: Path, batch_size: int, world: World) -> dict[str, Any]:
    """Measure a net's forward of one batch, and reading what it gives."""
    folder = f"data.path={(data / case.data).resolve()}"
    _, task = ready(case.recipe, [*case.settings, folder])
    model = task.make_model().eval()
    inputs = task.training.inputs(torch.arange(batch_size), None)
    with _outputs_of(model, _LAST_BLOCK[case.name]) as outputs:
        _run(model, inputs)
        computed = outputs.pop()
    rows = _rows_of(computed)
    with (
        tempfile.TemporaryDirectory() as place,
        _stored(computed, rows, Path(place)) as read,
    ):
        for from_disk in (False, True):
            torch.testing.assert_close(read(from_disk), computed, rtol=0, atol=0)
        steps: Mapping[str, Callable[[], object]] = {
            COMPUTED: lambda: _run(model, inputs),
            IN_MEMORY: lambda: read(False),
            ON_DISK: lambda: read(True),
        }
        found = alternate(steps, world, num_rounds=_NUM_ROUNDS, num_warm=2)
    return {
        "case": case.name,
        "batch_size": batch_size,
        "bytes_per_sample": rows.num_bytes,
        **{name: spread(seconds) for name, seconds in found.items()},
    }


def _run(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> None:
    """Run the forward as a frozen stage does."""
    with torch.no_grad():
        _ = model(**inputs) if isinstance(inputs, dict) else model(inputs)


@contextmanager
def _outputs_of(model: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """Note what a module returns."""
    found: list[Tensor] = []

    def note(_: nn.Module, __: object, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    handle = model.get_submodule(name).register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def _rows_of(outputs: Tensor) -> OutputRows:
    size, *others = outputs.shape
    per_sample = (1, *(0 for _ in others))
    value = SentTensor(
        "outputs", tuple(outputs.shape), per_sample, size, outputs.dtype, False
    )
    return OutputRows.of([outputs], [value], size, None)


@contextmanager
def _stored(
    outputs: Tensor, rows: OutputRows, folder: Path
) -> Iterator[Callable[[bool], Tensor]]:
    """Keep the outputs in memory and on disk; yield what reads them again."""
    size, prefix = len(outputs), b"the whole model."
    settings = Cache(folder, ram_bytes=1 << 30, disk_bytes=1 << 30)
    store = Store(settings, NextUse(0, size, size, lambda _: np.arange(size)))
    keys = [Key(prefix, 0, 0, sample) for sample in range(size)]

    def read(from_disk: bool) -> Tensor:
        contents = [store.get(key, from_disk=from_disk) for key in keys]
        [found] = rows.unpack([x for x in contents if x is not None], _CPU)
        return found

    with closing(store):
        store.keep(prefix, b"")
        store.put(keys, lambda: rows.pack([outputs], size), size * rows.num_bytes)
        store.flush()
        yield read


if __name__ == "__main__":
    main()
