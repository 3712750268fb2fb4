"""Every way in takes a model, a batch and another net from the host or the device.

A GPU's user has the model where it was made, and the batch where the loader left it. On
the first GPU that was seen, a pipeline refused a model there with a batch on the host,
before its first step, and one with a teacher on the host: what is captured had moved on
one side only. Other tests hold a CPU's results equal to the plain loop's; here each
cell gives a CPU's.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.run.support.forked import answers_of
from tests.run.support.placement_workers import cells

SPAWN = multiprocessing.get_context("spawn")
WORKERS = "placement_workers:run_cells"
SAMPLE = [
    "train dh-",
    "train hd-",
    "train ddh",
    "moving dhd",
    "loss dhh",
    "save hdd",
    "plan dh-",
    "compile_step dh-",
    "recipe hh-",
    "share hh-",
]
ON_TWO = ["recut hh-", "activations dd-", "fill dhh", "train hd-"]
ENTRIES = {
    "train": "-hd",
    "moving": "hd",
    "loss": "hd",
    "save": "hd",
    "freeze": "-",
    "cache": "-",
    "plan": "-",
    "compile_step": "-",
    "waves": "-",
    "share": "-",
}


def check(asked: list[str], folder: Path, num_workers: int = 1) -> None:
    """Each cell's weights, losses and outputs are those of a CPU."""
    for found in answers_of(
        WORKERS,
        *asked,
        num_workers=num_workers,
        folder=folder,
        context=SPAWN,
        timeout_s=60.0,
        whole_s=280.0,
    ):
        wrong = {k: x for k, x in found.items() if isinstance(x, str) or x > 1e-10}
        assert found.keys() == {*asked}
        assert not wrong


@pytest.mark.timeout(300)
def test_a_sample_of_all_places(tmp_path: Path) -> None:
    """One place of each entry point that once failed, or might have."""
    check(SAMPLE, tmp_path)


@pytest.mark.timeout(300)
def test_two_workers_share_what_is_not_on_the_host(tmp_path: Path) -> None:
    """Layers that move, activations, outputs and states go by way of the host.

    gloo refuses to send a GPU's tensors: "writev: Bad address", as here.
    """
    check(ON_TWO, tmp_path, num_workers=2)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("entry", ["recut", "activations", "fill", "moving", "train"])
def test_every_place_on_two_workers(entry: str, tmp_path: Path) -> None:
    """The same with four places of model and batch."""
    other = {"fill": "hd", "moving": "h"}.get(entry, "-")
    check(cells(entry, other), tmp_path, num_workers=2)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_place(entry: str, tmp_path: Path) -> None:
    """All eight places, or four where there is no other net."""
    check(cells(entry, ENTRIES[entry]), tmp_path)
