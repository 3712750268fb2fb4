"""Two workers that run one case after the other, and what both found together."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

import torch

from hocket.run.cluster.world import World
from tests.conformance.cases import CASES
from tests.conformance.ways import Outcome, run
from tests.run.support.worker_pool import WorkerPool, serve_texts

ENTRY: Final = "tests.conformance.workers:serve"


def serve(folder: str) -> None:
    """Run the cases that are named in a folder."""
    torch.set_num_threads(1)

    def answer(world: World, text: str) -> str:
        name, way = text.split()
        return json.dumps(asdict(run(CASES[name], way, world)))

    serve_texts(folder, answer)


def run_on_two(pool: WorkerPool, name: str, way: str) -> Outcome:
    """Run a case on both; workers that failed are not used again."""
    try:
        outcomes = [Outcome(**json.loads(x)) for x in pool.ask(f"{name} {way}")]
    except AssertionError as failed:
        return Outcome(f"hung, or ended: {failed}", False, {}, {}, {}, [])
    if any(outcome.error for outcome in outcomes):
        pool.end()
    return _joined(outcomes)


def _joined(outcomes: list[Outcome]) -> Outcome:
    """What came on both: the worst of each; what either of them has seen.

    Of errors, that of the worker which did not only wait for the other.
    """
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        return min(failed, key=lambda x: x.error.startswith("WaitError"))
    first = outcomes[0]
    for other in outcomes[1:]:
        for name, value in other.differences.items():
            first.differences[name] = max(first.differences.get(name, 0.0), value)
        first.warned += other.warned
        for name, noted in other.seen.items():
            first.seen[name] = first.seen.get(name) or noted
    return first
