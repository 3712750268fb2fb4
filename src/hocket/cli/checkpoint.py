"""`hocket checkpoint`: shows, verifies and exports checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, assert_never

import typer

from hocket.cli.shared.output import aligned
from hocket.draw.quantity import byte_size
from hocket.errors import CheckpointError


class Action(StrEnum):
    """What to do with checkpoints."""

    SHOW = "show"
    VERIFY = "verify"
    EXPORT = "export"


class Target(StrEnum):
    """A format that other programs read."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    PT = "pt"
    DCP = "dcp"


def checkpoint_command(
    action: Annotated[Action, typer.Argument(help="What to do.")],
    folder: Annotated[
        Path, typer.Argument(help="A run's checkpoints, or one of them.")
    ],
    target: Annotated[
        Path | None, typer.Argument(help="export: the new file or folder.")
    ] = None,
    step: Annotated[
        str, typer.Option(metavar="N", help="Which, where there are several.")
    ] = "latest",
    to: Annotated[Target, typer.Option(help="export: the form.")] = Target.SAFETENSORS,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="export: the averaged weights.")
    ] = False,
) -> None:
    """Look at checkpoints, verify every byte of them, export weights.

    hocket checkpoint show run/checkpoints;
    hocket checkpoint verify run/checkpoints;
    hocket checkpoint export run/checkpoints model.safetensors;
    hocket checkpoint export run/checkpoints my-bert --to hf
    """
    match action:
        case Action.SHOW:
            typer.echo("\n".join(aligned(_rows(folder))))
        case Action.VERIFY:
            _verify(folder, step)
        case Action.EXPORT:
            _export(folder, _given(target), step, to, averaged=averaged)
        case _:
            assert_never(action)


def _rows(folder: Path) -> Iterator[tuple[str, ...]]:
    from hocket.run.checkpoint.format.folder import saved
    from hocket.run.checkpoint.format.newest import newest
    from hocket.run.checkpoint.format.opened import open_checkpoint

    yield "checkpoint", "saved", "workers", "size", ""
    try:
        latest, damage = newest(folder), ""
    except CheckpointError as error:
        latest, damage = None, str(error)
    for path in saved(folder):
        mark = "latest" if path == latest else ""
        try:
            opened = open_checkpoint(path)
        except CheckpointError as error:
            yield path.name, "", "", "", f"{mark} {error}".strip()
            continue
        files = [file for part in opened.parts for file in part.files]
        freezing = opened.manifest.run.freezing
        if freezing is not None and freezing.layers:
            mark += f" frozen: {', '.join(freezing.layers)}"
        yield (
            path.name,
            opened.manifest.saved_at,
            str(len(opened.parts)),
            byte_size(sum(file.num_bytes for file in files)),
            mark.strip(),
        )
    if damage:
        yield "latest", "", "", "", damage


def _verify(folder: Path, step: str) -> None:
    from hocket.run.checkpoint.format.manifest import MANIFEST
    from hocket.run.checkpoint.format.newest import find
    from hocket.run.checkpoint.format.opened import verify

    path = folder if (folder / MANIFEST).exists() else find(folder, _step(step))
    opened = verify(path)
    files = [file for part in opened.parts for file in part.files]
    num_tensors = sum(len(file.tensors) for file in files)
    size = byte_size(sum(file.num_bytes for file in files))
    typer.echo(f"{path}: whole; {num_tensors:,} tensors in {len(files)} files, {size}")


def _export(
    folder: Path, target: Path, step: str, to: Target, *, averaged: bool
) -> None:
    from hocket.run.checkpoint.export import WeightFormat, export

    files = export(
        folder, target, WeightFormat(to.value), step=_step(step), averaged=averaged
    )
    for path in files:
        typer.echo(f"wrote {path}")


def _step(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _given(target: Path | None) -> Path:
    if target is None:
        raise typer.BadParameter("name a target after the folder, too")
    return target
