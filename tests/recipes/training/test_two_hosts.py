"""A recipe whose layers freeze, by torchrun on two hosts, as the how-to says it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, Final

import pytest

from tests.recipes.support.cifar_folder import cifar100
from tests.run.support.forked_python import ForkedPython
from tests.run.support.network import (
    ADDRESSES,
    PORT,
    Hosts,
    codes_of,
    outputs,
    two_hosts,
)
from tests.run.support.processes import eventually

WHOLE_S: Final = 200.0  # for four Pythons to import torch on a busy machine
TIMEOUT_S: Final = (
    15.0  # of the pipeline: at the end of an epoch, no message breaks off
)
END_S: Final = TIMEOUT_S + 20.0
SETTINGS: Final = (
    *("model.width=8", "model.num_blocks=4", "model.num_heads=2", "model.mlp_width=16"),
    *("data.side=32", "model.patch_size=16", "training.batch_size=8"),
    *("training.num_loaders=0", "optimizer.num_warmup_steps=0"),
    *("pipeline.num_microbatches=2", "freeze.alpha=0.5", 'freeze.shapes={2 = "1x2"}'),
)

pytestmark = [pytest.mark.network, pytest.mark.long, pytest.mark.timeout(400)]


def start(hosts: Hosts, folder: Path, num_epochs: int) -> list[ForkedPython]:
    """`hocket train cifar100-vit` under torchrun, a worker on each host."""
    data = folder / "data"
    data.mkdir()
    cifar100(data, 32)
    own = (
        f"data.path={data}",
        f"run.profile_folder={folder / 'profiles'}",
        f"training.num_epochs={num_epochs}",
        f"pipeline.timeout_s={TIMEOUT_S}",
    )
    script = ["-m", "hocket", "train", "cifar100-vit", "--layout", "2x1"]
    script += ["--run-dir", str(folder / "run")]
    script += [x for setting in (*SETTINGS, *own) for x in ("--set", setting)]
    address = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    return [
        hosts.torchrun(host, [*address, "--node-rank", str(host)], script, folder)
        for host in range(2)
    ]


def epochs(folder: Path) -> list[dict[str, Any]]:
    """The records of epochs, so far."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if record["kind"] == "epoch"]


def test_a_recipe_freezes_on_two_hosts(tmp_path: Path) -> None:
    """Two stages over the cable, then a replica on each host; both bandwidths."""
    with two_hosts() as hosts:
        launchers = start(hosts, tmp_path, 3)
        assert codes_of(launchers, WHOLE_S, tmp_path) == [0, 0], outputs(tmp_path)
    found = epochs(tmp_path)
    assert [x["layout"] for x in found] == ["2x1", "1x2", "1x2"]
    assert [x["num_frozen"] for x in found] == [0, 2, 3]
    assert found[0]["message_bytes"] > 0 < found[1]["reduced_bytes"]
    assert all(x["link_bytes_per_s"] > 0 < x["ring_bytes_per_s"] for x in found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_ends_both_hosts(tmp_path: Path, number: int) -> None:
    """Once layers are frozen; no process is left on either."""
    with two_hosts() as hosts:
        launchers = start(hosts, tmp_path, 100_000)
        begun = eventually(lambda: len(epochs(tmp_path)) > 1, WHOLE_S)
        assert begun, outputs(tmp_path)
        since_s = time.monotonic()
        launchers[1].send_signal(number)
        codes = codes_of(launchers, 60.0, tmp_path)
        assert 0 not in codes, outputs(tmp_path)
        assert time.monotonic() - since_s < END_S, outputs(tmp_path)
        assert eventually(lambda: not hosts.pids(), END_S)
