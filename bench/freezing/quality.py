"""Accuracy with and without freezing, of three seeds, in one process.

    python -m bench.freezing.quality [--cases "ViT, CIFAR-10"] [--seeds 0 1 2]

Each seed pretrains a model for some epochs, and fine-tunes it for ten, with each of the
policies. A seed of a case takes some two minutes, and is kept when it is done: one that
is trained alone is added to those before it.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.freezing.cases import CASES, LOCAL, Case
from bench.freezing.parts import joined, rows_of
from bench.freezing.table import qualities
from bench.freezing.training import pretrain, ready, train, use_one_thread
from bench.measure import environment, write_result
from hocket.cli.shared.output import aligned
from hocket.run.cluster.world import World, join_world

RESULTS: Final = Path(__file__).parent / "results" / "quality.json"
NUM_SEEDS: Final = 3
NUM_PRETRAINED: Final = 3  # epochs
POLICIES: Final = {
    "nothing freezes": ("freeze.policy=none",),
    "alpha = 1/5": ("freeze.policy=alpha", "freeze.alpha=0.2"),
    "alpha = 1/2": ("freeze.policy=alpha", "freeze.alpha=0.5"),
}
_SIZES: Final = (
    "pipeline.layout=",
    "pipeline.num_workers=1",
    "model.num_blocks=6",
    "data.max_samples=1500",
)
_OWN: Final = {
    "ViT, CIFAR-10": ("model.patch_size=8",),
    "BERT, SST-2": ("data.num_tokens=32",),
}


def main() -> None:
    """Train what was asked for, and keep it as JSON after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(NUM_SEEDS))
    parser.add_argument("--data", type=Path, default=LOCAL)
    arguments = parser.parse_args()
    use_one_thread()  # two wait for each other where another program computes, too
    rows = rows_of(RESULTS)
    with closing(join_world()) as world:
        for name, seed in product(arguments.cases, sorted(arguments.seeds)):
            found = _trained(CASES[name], seed, arguments.data, world)
            rows[name] = joined(found, rows.get(name), "policies", seed)
            kept = {"environment": environment(), "rows": [*rows.values()]}
            write_result(RESULTS, kept)
    for line in aligned(map(tuple, qualities([*rows.values()]))):
        print(line)


def _trained(case: Case, seed: int, data: Path, world: World) -> dict[str, Any]:
    """Train each policy from what one seed has pretrained."""
    folder = f"data.path={(data / case.data).resolve()}"
    common = [*case.settings, *_SIZES, *_OWN[case.name], folder]
    evaluation = ready(case.recipe, [*common, "data.max_samples=4000"])[1].evaluation
    own = [*common, f"training.seed={seed}"]
    first = [*own, "freeze.policy=none", f"training.num_epochs={NUM_PRETRAINED}"]
    ran: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        begun, _ = pretrain(
            *ready(case.recipe, first), world, Path(place) / "begun" / "model"
        )
        for name, settings in POLICIES.items():
            asked = [*own, *settings, f"model.pretrained={begun}"]
            found = train(*ready(case.recipe, asked), evaluation, world, Path(place))
            ran[name] = found
            print(f"{case.name} | {seed} | {name} | {found['accuracy']}", flush=True)
    return {"case": case.name, "policies": ran}


if __name__ == "__main__":
    main()
