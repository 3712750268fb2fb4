"""`hocket doctor`: checks for what stops jobs before their first step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hocket import env
from hocket.cli.shared.options import JsonOption
from hocket.env import ExitCode

if TYPE_CHECKING:
    from hocket.run.cluster.doctor.finding import Finding

ENTRY: Final = "hocket.run.cluster.doctor.examine:worker"
PROOF: Final = "hocket.run.prove:prove"
STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor_command(
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Start this many, and test what they share."),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where `--prove` writes its JSON.")
    ] = Path("runs"),
    proves: Annotated[
        bool,
        typer.Option("--prove", help="Train a small model on all devices; compare it."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or all hosts of a job, for what stops people.

    Under torchrun every worker takes part, and rank 0 prints: `torchrun ... -m hocket
    doctor`. Ends with 4 if something must be mended before training can run, or if
    what `--prove` trains differs from the plain loop.
    """
    from hocket.run.cluster.doctor.finding import Severity, worst

    if proves:
        show_proof(prove(workers, folder), folder, as_json=as_json)
        return
    findings = gather(workers or 1)
    if not findings:  # rank 0 prints
        return
    severity = worst(findings)
    if as_json:
        findings_json = [finding.to_json() for finding in findings]
        report = {"severity": severity.value, "findings": findings_json}
        typer.echo(json.dumps(report, indent=2))
    else:
        show(findings)
    if severity is Severity.FAIL:
        raise typer.Exit(ExitCode.UNFIT)


def gather(num_workers: int) -> list[Finding]:
    """Return the findings of this process, or of the workers that it starts.

    Raises:
        WorkerError: a worker ended before it could report.
    """
    from hocket.run.cluster.doctor.examine import examine
    from hocket.run.cluster.doctor.finding import Finding
    from hocket.run.cluster.launch import launch

    if env.RANK.is_set or num_workers == 1:
        return examine()
    with TemporaryDirectory(prefix="hocket-doctor-") as name:
        findings_json: list[Any] = launch(
            ENTRY, num_workers=num_workers, run_dir=Path(name)
        )
    return [Finding.from_json(finding) for finding in findings_json[0]]


def prove(num_workers: int | None, folder: Path) -> dict[str, Any]:
    """Return what training on all devices, or so many workers, has shown; on rank 0.

    Raises:
        WorkerError: a worker failed.
    """
    from hocket import cuda
    from hocket.run.cluster.launch import launch

    if env.RANK.is_set:
        from hocket.run.prove import prove as on_this_worker

        return on_this_worker()
    num = num_workers or cuda.num_devices() or 2
    typer.echo(f"trains a small model on {num} workers, and as a plain loop", err=True)
    found: list[dict[str, Any]] = launch(PROOF, num_workers=num, run_dir=folder)
    return found[0]


def show_proof(proof: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    """Print the proof, and write it into the folder."""
    if "is_equal" not in proof:  # rank 0 prints
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(proof, indent=2)
    path = folder / "proof.json"
    path.write_text(text + "\n", encoding="utf-8")
    piped, plain = proof["pipeline_samples_per_s"], proof["plain_samples_per_s"]
    verdict = "equal to" if proof["is_equal"] else "NOT equal to"
    typer.echo(
        text
        if as_json
        else f"{len(proof['devices'])} x {proof['devices'][0]}, {proof['backend']}: "
        f"{verdict} the plain loop in float64 (largest difference "
        f"{proof['difference']:.1e}, of {proof['differs_most']})\n"
        f"{piped:,.0f} samples/s; a plain loop on one of them {plain:,.0f} "
        f"({piped / plain:.2f} times)\nfor an issue report: {path}"
    )
    if not proof["is_equal"]:
        raise typer.Exit(ExitCode.UNFIT)


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table, each with its fix."""
    console = Console()
    console.print(table_of(findings))
    bad = [finding for finding in findings if finding.mend]
    if not bad:
        console.print("nothing needs mending", style=STYLES["ok"])


def table_of(findings: Sequence[Finding]) -> Table:
    """Return one row for each finding."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    has_hosts = any(finding.host for finding in findings)
    for name in ("check", *(("host",) if has_hosts else ()), "", "found"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        severity = finding.severity.value
        found = Text(finding.found)
        if finding.mend:
            found.append(f"\nmend: {finding.mend}", style="italic")
        row = [Text(finding.check), Text(severity, style=STYLES[severity]), found]
        if has_hosts:
            row.insert(1, Text(finding.host))
        table.add_row(*row)
    return table
