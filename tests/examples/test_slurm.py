"""The script for Slurm: time runs out, all is saved, and the next job goes on.

Slurm's commands are stood in for, as much as the script asks of them: `srun` starts a
task on each of two hosts, and kills both when it gets a SIGTERM, as the real one does;
`scancel` sends tasks a signal; `scontrol` notes what it was asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.recipes.support.interrupted import SMALL, last_weights, records, same
from tests.run.support.network import HOST_NAMES, two_hosts
from tests.run.support.processes import ROOT, environment, eventually

SCRIPT: Final = ROOT / "examples" / "slurm" / "train.sbatch"
JOB: Final = "1234"
WHOLE_S: Final = 150.0  # for four Pythons to import torch on a busy machine
SETTINGS: Final = (
    *SMALL,
    "pipeline.num_workers=2",
    "pipeline.cut=['blocks.0']",
    "training.num_epochs=40",  # 60 steps
    "training.num_loaders=1",  # which the signal reaches, too
    "training.evaluate_every_steps=",
    "checkpoint.every_steps=",
)
SRUN: Final = """#!/bin/sh
trap 'kill -KILL $(cat "$FAKE/tasks"); exit 137' TERM
: > "$FAKE/tasks"
n=0
for host in $HOSTS; do
    ip netns exec "${host%%=*}" unshare --uts sh -c 'hostname "$0"; exec "$@"' \\
        "${host##*=}" "$@" > "$FAKE/task-$n.txt" 2>&1 &
    echo $! >> "$FAKE/tasks"
    n=$((n + 1))
done
code=0
for task in $(cat "$FAKE/tasks"); do wait "$task" || code=$?; done
exit $code
"""
SCANCEL: Final = """#!/bin/sh
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat "$FAKE/tasks")
"""
SCONTROL: Final = """#!/bin/sh
if [ "$1" = show ]; then
    for host in $HOSTS; do echo "${host##*=}"; done
else
    echo "$*" >> "$FAKE/asked"
fi
"""

pytestmark = [pytest.mark.network, pytest.mark.long, pytest.mark.timeout(600)]


def hocket(folder: Path, run: str) -> list[str]:
    """The arguments of `hocket train`."""
    settings = [x for setting in SETTINGS for x in ("--set", setting)]
    return ["digits-vit", "--run-dir", str(folder / run), *settings]


def begin(folder: Path, hosts: tuple[str, str]) -> subprocess.Popen[bytes]:
    """Bash on the script, as `sbatch` would start it."""
    pairs = zip(hosts, HOST_NAMES, strict=True)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{environment()['PATH']}"
    variables = {
        **environment(),
        "PATH": f"{path}:/usr/sbin:/sbin",
        "FAKE": str(folder),
        "HOSTS": " ".join(f"{space}={name}" for space, name in pairs),
        "SLURM_JOB_ID": JOB,
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }
    with (folder / "batch.txt").open("ab") as out:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *hocket(folder, "run")],
            env=variables,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def num_steps(run_dir: Path) -> int:
    """How many steps a run has reported."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def test_a_job_saves_before_its_time_is_up_and_the_next_goes_on(tmp_path: Path) -> None:
    """It ends with the weights and losses of a run that was never interrupted."""
    (tmp_path / "bin").mkdir()
    scripts = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
    for name, text in scripts.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o700)
    run_dir, asked = tmp_path / "run", tmp_path / "asked"

    def said() -> str:
        files = sorted(tmp_path.glob("*.txt"))
        return "\n".join(f"== {x.name}\n{x.read_text()[-5000:]}" for x in files)

    with two_hosts(have_names=True) as hosts:
        job = begin(tmp_path, hosts.names)
        try:
            assert eventually(lambda: num_steps(run_dir) > 5, WHOLE_S), said()
            job.terminate()  # as --signal=B:TERM does
            assert job.wait(60) == 1, said()
            before = num_steps(run_dir)
            assert f"SIGTERM: saved after step {before} in" in said()
            assert asked.read_text() == f"requeue {JOB}\n"
            assert eventually(lambda: not hosts.pids(), 10.0), said()
            job = begin(tmp_path, hosts.names)
            assert job.wait(WHOLE_S) == 0, said()
        finally:
            job.kill()
            job.wait()
    assert f"goes on from {run_dir / 'checkpoints'} after step {before}\n" in said()
    assert asked.read_text() == f"requeue {JOB}\n"

    whole = [sys.executable, "-m", "hocket", "train", *hocket(tmp_path, "whole")]
    subprocess.run(whole, env=environment(), cwd=tmp_path, check=True, timeout=WHOLE_S)
    assert before < num_steps(tmp_path / "whole") == num_steps(run_dir)
    assert records(run_dir, "step") == records(tmp_path / "whole", "step")
    assert same(last_weights(run_dir), last_weights(tmp_path / "whole"))
