"""`hocket draw`: draws schedules and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Final, assert_never

import typer

from hocket.cli.shared.options import Sizes, UniformCosts, load_timeline, with_options
from hocket.cli.shared.output import write_output
from hocket.draw.html import to_html
from hocket.draw.layout import Style, Titled
from hocket.draw.palette import Theme
from hocket.draw.perfetto import to_perfetto
from hocket.draw.svg import to_svg
from hocket.draw.text import legend, to_text


class PictureFormat(Enum):
    """A format of pictures. The value is its name on the command line."""

    TEXT = "text"
    SVG = "svg"
    HTML = "html"
    PERFETTO = "perfetto"


_SUFFIXES: Final = {
    ".txt": PictureFormat.TEXT,
    ".svg": PictureFormat.SVG,
    ".html": PictureFormat.HTML,
    ".json": PictureFormat.PERFETTO,
}

SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SCHEDULE",
        help="Names of schedules, or files: a schedule's text, PyTorch's CSV (*.csv), "
        "a timeline (*.json). Several are drawn one above the other.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="A file; its suffix says the format: .txt .svg .html, or .json, a "
        "trace for ui.perfetto.dev. By default text goes to the terminal.",
    ),
]


@with_options
def draw_command(
    sources: SourcesArgument,
    sizes: Sizes,
    costs: UniformCosts,
    out: OutOption = None,
    form: Annotated[
        PictureFormat | None,
        typer.Option("--format", help="If the suffix of --out does not say it."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=60, help="Columns of text, or points of a picture."
        ),
    ] = None,
    ground: Annotated[
        Theme | None,
        typer.Option(
            "--theme",
            help="Of an SVG, by default its reader's; of text the terminal's, which "
            "then gets colours.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Above the picture.")] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Draw a line per message (SVG).")
    ] = False,
    memory: Annotated[
        bool, typer.Option(help="Draw the memory of each device (SVG).")
    ] = True,
) -> None:
    """Draw schedules, or timelines, as text, SVG, HTML or Perfetto traces.

    A schedule is simulated first, with equal devices that take the seconds given.
    """
    format_ = form or _format_of(out)
    if format_ is PictureFormat.PERFETTO and len(sources) > 1:
        raise typer.BadParameter("a trace holds one timeline: give one schedule")
    timelines = [
        (_name(source), load_timeline(source, sizes, costs.make()))
        for source in sources
    ]
    options = _PictureOptions(width, ground, title, messages, memory)
    if out is not None:
        size = write_output(out, options.contents(format_, timelines))
        typer.echo(f"{out}: {size:,} bytes")
    elif format_ is PictureFormat.TEXT:
        typer.echo(
            options.text(timelines, get_terminal_size((100, 24)).columns, ground)
        )
    else:
        typer.echo(options.contents(format_, timelines))


@dataclass(frozen=True, slots=True)
class _PictureOptions:
    """The options of a picture."""

    width: int | None
    ground: Theme | None
    title: str | None
    shows_messages: bool
    shows_memory: bool

    def contents(self, format_: PictureFormat, timelines: Sequence[Titled]) -> str:
        """Return what a file of this format holds."""
        match format_:
            case PictureFormat.TEXT:
                return self.text(timelines, 100, None) + "\n"
            case PictureFormat.SVG:
                return self._svg(timelines)
            case PictureFormat.HTML:
                names = ", ".join(name for name, _ in timelines)
                return to_html(timelines, self.title or names)
            case PictureFormat.PERFETTO:
                return to_perfetto(timelines[0][1])
            case _:
                assert_never(format_)

    def text(
        self, timelines: Sequence[Titled], width: int, ground: Theme | None
    ) -> str:
        """Return one picture after the other, with names if there are several."""
        pictures = []
        for name, timeline in timelines:
            head = f"{name}\n" if len(timelines) > 1 else ""
            text = to_text(timeline, width=self.width or width, colour=ground)
            pictures.append(head + text)
        said = fill(legend(timeline for _, timeline in timelines), self.width or width)
        return "\n\n".join(([self.title] if self.title else []) + [*pictures, said])

    def _svg(self, timelines: Sequence[Titled]) -> str:
        style = Style(
            width=float(self.width or 960),
            show_memory=self.shows_memory,
            show_transfers=self.shows_messages,
        )
        return to_svg(timelines, title=self.title or "", style=style, theme=self.ground)


def _format_of(out: Path | None) -> PictureFormat:
    """Return the format of a file's suffix; text for the terminal."""
    if out is None:
        return PictureFormat.TEXT
    if out.suffix not in _SUFFIXES:
        raise typer.BadParameter(
            f"{out}: the suffix names no format; use {' '.join(_SUFFIXES)} or "
            "--format. Other programs make a PNG of an SVG: "
            "cairosvg picture.svg -o picture.png"
        )
    return _SUFFIXES[out.suffix]


def _name(source: str) -> str:
    """Return a schedule's name; a file's without folder and suffix."""
    path = Path(source)
    return path.stem if path.suffix and path.exists() else source
