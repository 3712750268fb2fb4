"""Accuracy with and without freezing, of three seeds, in one process.

    python -m bench.freezing.quality [--cases "ViT, CIFAR-10"] [--data FOLDER]

Each seed pretrains a model for some epochs, and fine-tunes it for ten, with each of the
policies; a case takes some three minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench.freezing.cases import CASES, LOCAL, Case
from bench.freezing.table import qualities
from bench.freezing.training import pretrain, ready, train
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
    parser.add_argument("--data", type=Path, default=LOCAL)
    arguments = parser.parse_args()
    rows = []
    with closing(join_world()) as world:
        for name in arguments.cases:
            rows.append(_case(CASES[name], arguments.data, world))
            write_result(RESULTS, {"environment": environment(), "rows": rows})
    for line in aligned(map(tuple, qualities(rows))):
        print(line)


def _case(case: Case, data: Path, world: World) -> dict[str, Any]:
    folder = f"data.path={(data / case.data).resolve()}"
    common = [*case.settings, *_SIZES, *_OWN[case.name], folder]
    evaluation = ready(case.recipe, [*common, "data.max_samples=4000"])[1].evaluation
    ran: dict[str, list[Any]] = {name: [] for name in POLICIES}
    for seed in range(NUM_SEEDS):
        with tempfile.TemporaryDirectory() as place:
            own = [*common, f"training.seed={seed}"]
            first = [
                *own,
                "freeze.policy=none",
                f"training.num_epochs={NUM_PRETRAINED}",
            ]
            begun = pretrain(
                *ready(case.recipe, first), world, Path(place) / "begun" / "model"
            )
            for name, settings in POLICIES.items():
                asked = [*own, *settings, f"model.pretrained={begun}"]
                found = train(
                    *ready(case.recipe, asked), evaluation, world, Path(place)
                )
                ran[name].append(found)
                print(f"{case.name} | {name} | {found['accuracy']:.3f}", flush=True)
    return {"case": case.name, "policies": ran}


if __name__ == "__main__":
    main()
