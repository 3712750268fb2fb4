"""Accuracy with and without freezing, of three seeds, by the length of the pretraining.

    python -m bench.freezing.quality [--cases "ViT, CIFAR-10"] [--seeds 0 1 2]

    samples    0 ........ 1500 .................................. 5000
               fine-tuned │ pretrained for 3 epochs ─▶ 7 more ─▶ 20 more

Each seed pretrains a model on other samples than those that it is fine-tuned on, for
ten epochs, with each of the policies, whenever so many epochs of pretraining are over.
A seed of a case takes some four minutes. What is done is kept: a seed that is trained
alone is added to those before it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from bench.freezing.cases import CASES, LOCAL, Case
from bench.freezing.parts import joined, rows_of
from bench.freezing.table import qualities
from bench.freezing.training import pretrain, ready, train, use_one_thread
from bench.measure import environment, write_result
from hocket.cli.shared.output import aligned
from hocket.run.cluster.world import World, join_world
from hocket.run.data.samples import EpochRandom, Samples

RESULTS: Final = Path(__file__).parent / "results" / "quality.json"
NUM_SEEDS: Final = 3
NUM_PRETRAINED: Final = (3, 10, 30)  # epochs
NUM_TUNED: Final = 1500  # samples, the first ones
NUM_OTHERS: Final = 3500  # samples behind them, for the pretraining
POLICIES: Final = {
    "nothing freezes": ("freeze.policy=none",),
    "alpha = 1/5": ("freeze.policy=alpha", "freeze.alpha=0.2"),
}
_SIZES: Final = (
    "pipeline.layout=",
    "pipeline.num_workers=1",
    "pipeline.num_microbatches=1",
    "model.num_blocks=6",
)
_OWN: Final = {
    "ViT, CIFAR-10": ("model.patch_size=8",),
    "BERT, SST-2": ("data.num_tokens=32",),
}
# What the pretraining has beside.
_VARIED: Final = {
    "ViT, CIFAR-10": ("data.shift_pixels=4", "data.flip=true"),
    "BERT, SST-2": (),
}


@dataclass(frozen=True, slots=True)
class Others:
    """The rows of samples behind the first ones.

    Args:
        samples: all of them.
        begin: the first row.
        num_samples: how many rows.
    """

    samples: Samples
    begin: int
    num_samples: int

    def __copy__(self) -> Others:
        """Copy the wrapped samples too: a copy may cache less than the original."""
        return replace(self, samples=copy(self.samples))

    @property
    def fingerprint(self) -> int:
        """The fingerprint of all samples."""
        return self.samples.fingerprint

    def inputs(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """See `Samples.inputs`."""
        return self.samples.inputs(rows + self.begin, draw)

    def targets(self, rows: Tensor, draw: EpochRandom | None) -> Any:
        """See `Samples.targets`."""
        return self.samples.targets(rows + self.begin, draw)


def main() -> None:
    """Train what was asked for, and keep it as JSON after each pretraining."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(NUM_SEEDS))
    parser.add_argument("--data", type=Path, default=LOCAL)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    use_one_thread()  # two wait for each other where another program computes, too
    rows = rows_of(arguments.output)
    with closing(join_world()) as world:
        for seed, name in product(sorted(arguments.seeds), arguments.cases):
            for found in _trained(CASES[name], seed, arguments.data, world):
                case = found["case"]
                rows[case] = joined(found, rows.get(case), "policies", seed)
                kept = {"environment": environment(), "rows": [*rows.values()]}
                write_result(arguments.output, kept)
    for line in aligned(map(tuple, qualities([*rows.values()]))):
        print(line)


def _trained(
    case: Case, seed: int, data: Path, world: World
) -> Iterator[dict[str, Any]]:
    """Train each policy from what one seed has pretrained, longer and longer."""
    folder = f"data.path={(data / case.data).resolve()}"
    common = [*case.settings, *_SIZES, *_OWN[case.name], folder]
    own = [*common, f"training.seed={seed}"]
    first = [*own, *_VARIED[case.name], "freeze.policy=none", "data.max_samples="]
    begun: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as place:
        for before, num_epochs in pairwise((0, *NUM_PRETRAINED)):
            more = f"training.num_epochs={num_epochs - before}"
            recipe, task = ready(case.recipe, [*first, more, *begun])
            others = Others(task.training, NUM_TUNED, NUM_OTHERS)
            model, _ = pretrain(
                recipe,
                replace(task, training=others),
                world,
                Path(place) / "begun" / str(num_epochs),
            )
            begun = (f"model.pretrained={model}",)
            ran: dict[str, Any] = {}
            for name, settings in POLICIES.items():
                asked = [*own, *settings, *begun, f"data.max_samples={NUM_TUNED}"]
                tuned = ready(case.recipe, asked)
                found = train(*tuned, task.evaluation, world, Path(place))
                ran[name] = found
                about = f"{case.name} | {seed} | {num_epochs} | {name}"
                print(f"{about} | {found['accuracy']}", flush=True)
            yield {"case": f"{case.name}; {num_epochs} epochs", "policies": ran}


if __name__ == "__main__":
    main()
