"""A worker that trains a small recipe with each part of freezing left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hocket.freeze.cache import payoff
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.task import make_task
from hocket.recipes.training.train import make_pipeline
from tests.run.support.freezing_workers import measure_briefly
from tests.run.support.joined import join

_CACHE: Final = (
    "cache.ram_bytes=10000000",
    "cache.disk_bytes=10000000",
    "cache.draws_once=true",
)
_BY_HAND: Final = ("freeze.policy=listed", "freeze.num_frozen={1 = 2}")
_STAYS: Final = (*_BY_HAND, "freeze.shapes={}")
_MOVES: Final = (*_BY_HAND, 'freeze.shapes={2 = "1x2"}')
VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    "nothing freezes": ("freeze.policy=none",),
    "cut again": _STAYS,
    "frozen in place": (*_BY_HAND, "freeze.recut=false"),
    "cache": (*_STAYS, *_CACHE),
    "all": (*_MOVES, *_CACHE),
    "greedy": (*_BY_HAND, "freeze.balance=greedy"),
}


def train_variants(settings: list[str], folder: str) -> Any:
    """Train three epochs of each; two layers freeze after the first.

    Returns:
        By variant, the layout, frozen layers and hits of each epoch.
    """
    measure_briefly()
    payoff._MOST = float("inf")  # type: ignore[misc]
    world = join()
    found = {}
    for number, (name, own) in enumerate(VARIANTS.items()):
        place = Path(folder) / str(number)
        asked = [*settings, *own]
        if _CACHE[0] in own:
            asked.append(f"cache.folder={place}")
        recipe = resolve("cifar100-vit", asked, allow_outside=True).recipe
        task = make_task(recipe)
        with make_pipeline(
            task, place, profile_dir=Path(folder), world=world
        ) as pipeline:
            epochs: dict[int, tuple[str, int, int]] = {}
            for x in pipeline.train(task.loader()):
                hits = epochs.get(task.epoch(x.step), ("", 0, 0))[2] + x.cache_hits
                epochs[task.epoch(x.step)] = x.layout, x.num_frozen, hits
        found[name] = [*epochs.values()]
    return found
