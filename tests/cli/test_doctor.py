"""`hocket doctor`: alone, with workers, and on all hosts of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.env import ExitCode
from hocket.run.cluster.doctor.examine import Ports
from tests.run.support.forked_command import hocket_forked
from tests.run.support.network import ADDRESSES, PORT, codes_of, outputs, two_hosts

CHECKS: Final = {
    "versions",
    "GPU",
    "free ports",
}
TOGETHER: Final = {"rendezvous", "same versions", "all-reduce, gloo"}
WHOLE_S: Final = 150.0  # for two Pythons to import torch on a busy machine
FEW_PORTS: Final = Ports(28_000, 27_990, ())
PORT_CHECK: Final = "port 29500"


def reported_as_json(text: str) -> dict[str, Any]:
    """The report, with findings by their check."""
    report = json.loads(text)
    return {**report, "findings": {one["check"]: one for one in report["findings"]}}


def test_one_host_as_a_table(free_dir: Path) -> None:
    """Every check has a line, and every one that is not ok says how to mend it."""
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code in {ExitCode.OK, ExitCode.UNFIT}
    assert all(check in result.output for check in CHECKS)
    assert list(free_dir.iterdir()) == []


def test_one_host_as_json(free_dir: Path) -> None:
    """The same, with all numbers."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = reported_as_json(result.output)
    assert set(report["findings"]) == CHECKS | {PORT_CHECK}
    assert list(free_dir.iterdir()) == []
    for finding in report["findings"].values():
        assert (finding["severity"] == "ok") == (not finding["mend"])


def test_what_must_be_mended_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """4, so that scripts can stop before they start."""
    monkeypatch.setattr(
        "hocket.run.cluster.doctor.examine.probe_ports", lambda: FEW_PORTS
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == ExitCode.UNFIT
    assert "mend: " in result.output


@pytest.mark.timeout(200)
def test_with_workers(tmp_path: Path) -> None:
    """They are started, measured, and gone."""
    command = "doctor", "--workers", "2", "--json"
    done = hocket_forked(*command, cwd=tmp_path, timeout_s=WHOLE_S)
    report = reported_as_json(done.stdout)
    assert set(report["findings"]) >= CHECKS | TOGETHER, done.stderr
    assert done.returncode == (4 if report["severity"] == "fail" else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.network
@pytest.mark.timeout(300)
def test_on_all_hosts_of_a_job(tmp_path: Path) -> None:
    """Rank 0 reports for both."""
    with two_hosts() as hosts:
        meet = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        script = ["-m", "hocket", "doctor", "--json"]
        launchers = [
            hosts.torchrun(
                host, [*meet, "--node-rank", str(host)], script, tmp_path, COLUMNS="80"
            )
            for host in range(2)
        ]
        codes = codes_of(launchers, WHOLE_S, tmp_path)
    report = json.loads((tmp_path / "out-0.txt").read_text())
    assert (tmp_path / "out-1.txt").read_text() == "", outputs(tmp_path)
    assert codes == [int(report["severity"] == "fail"), 0], outputs(tmp_path)
    ports = [one for one in report["findings"] if one["check"] == "free ports"]
    for one, address in zip(ports, ADDRESSES, strict=True):
        assert one["host"].endswith(f"({address})")
    together = {one["check"]: one for one in report["findings"] if not one["host"]}
    assert set(together) >= TOGETHER
    assert "2 workers on 2 hosts met" in together["rendezvous"]["found"]
    [link] = together["all-reduce, gloo"]["numbers"]["links"]
    assert not link["same_host"]
    assert link["bytes_per_s"] > 1e6


@pytest.mark.timeout(200)
def test_a_small_model_proves_the_machine(tmp_path: Path) -> None:
    """Two workers train as a plain loop does; an issue report can hold the rest."""
    command = "doctor", "--prove", "--workers", "2", "--folder", "proof"
    done = hocket_forked(*command, cwd=tmp_path, timeout_s=WHOLE_S)
    assert done.returncode == 0, done.stderr
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert "equal to the plain loop in float64" in done.stdout
    assert proof["is_equal"]
    assert 0 <= proof["difference"] <= 1e-10
    assert proof["devices"] == ["cpu", "cpu"]
    assert proof["backend"] == "gloo"
    assert proof["pipeline_samples_per_s"] > 0
    assert proof["plain_samples_per_s"] > 0
