"""Writes a command's output to the file that the user named."""

from __future__ import annotations

from pathlib import Path

import typer


def write_output(path: Path, contents: str | bytes) -> int:
    """Write a file; return its bytes.

    Raises:
        typer.BadParameter: it cannot be written.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    try:
        return path.write_bytes(data)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}"
        raise typer.BadParameter(reason) from None
