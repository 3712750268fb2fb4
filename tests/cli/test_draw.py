"""`hocket draw` writes every format, and says what is wrong with what it was given."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.core.timelines.timeline import Timeline
from hocket.schedules import make_schedule
from tests.draw.timelines import REAL, measured, simulated

SIZES = ("--devices", "4", "--microbatches", "8")


def draw(*arguments: str) -> str:
    """What a call prints that succeeds."""
    done = CliRunner().invoke(app, ["draw", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: str) -> tuple[int, str]:
    """The exit code of a call that fails, and what it says, on one line."""
    done = CliRunner().invoke(app, ["draw", *arguments])
    assert done.exit_code != 0
    return done.exit_code, " ".join(done.output.split())


def test_a_schedule_by_name_goes_to_the_terminal() -> None:
    """The picture of 1F1B, whose bubble is (p - 1) / (m + p - 1)."""
    text = draw("1f1b", *SIZES, "--width", "120")

    assert "d3  .........F0 B0--- F1 B1---" in text
    assert "bubble 27.3 %" in text
    *_, last = text.split("\n\n")
    assert " ".join(last.split()) == (
        "F forward, B backward, U update; F0 is of microbatch 0, 2F0 of stage 2; a "
        "point: nothing to do; peak: microbatches held at most; makespan: from begin "
        "to end; steady: the bubble without warm-up and drain"
    )


def test_seconds_change_the_picture() -> None:
    """Without weight gradients and with messages."""
    text = draw("gpipe", *SIZES, "--weight-grad", "0", "--message", "0.5")

    assert "makespan 25 s" in text


def test_the_suffix_says_the_format(free_dir: Path) -> None:
    """Each file is what its name promises, and its size is printed."""
    for name in ("a.txt", "a.svg", "a.html", "a.json"):
        reported = draw("1f1b", *SIZES, "-o", name)
        assert reported == f"{name}: {(free_dir / name).stat().st_size:,} bytes\n"
    assert ET.parse(free_dir / "a.svg").getroot().tag.endswith("svg")
    assert (free_dir / "a.html").read_text().startswith("<!doctype html>")
    assert json.loads((free_dir / "a.json").read_text())["traceEvents"]
    assert (free_dir / "a.txt").read_text().startswith(" ")


def test_the_format_may_be_said(free_dir: Path) -> None:
    """To a file of any name, or to the terminal."""
    draw("1f1b", *SIZES, "--format", "svg", "-o", "picture")

    assert draw("1f1b", *SIZES, "--format", "svg") == (
        (free_dir / "picture").read_text() + "\n"
    )


def test_several_are_drawn_one_above_the_other() -> None:
    """With their names, each with the stages per device that it is used with."""
    text = draw("gpipe", "interleaved-1f1b", *SIZES)
    svg = draw("gpipe", "interleaved-1f1b", *SIZES, "--format", "svg")

    assert text.index("gpipe") < text.index("interleaved-1f1b")
    assert "interleaved-1f1b</text>" in svg


def test_a_schedule_file_is_drawn(free_dir: Path) -> None:
    """The text form and PyTorch's CSV give the picture of the name."""
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    Path("order.txt").write_text(str(schedule))
    schedule.to_csv("order.csv")
    by_name = draw("1f1b", *SIZES)

    assert draw("order.txt") == by_name
    assert draw("order.csv") == by_name
    assert "step 2" in draw("order.txt", "--steps", "3")


def test_a_timeline_file_is_drawn_as_it_is(free_dir: Path) -> None:
    """Also a measured one: any timeline becomes any picture."""
    timeline = measured(simulated("1f1b", 2, 4, costs=REAL))
    Path("run.json").write_text(timeline.to_json())

    draw("run.json", "-o", "trace.json")
    assert json.loads(Path("trace.json").read_text())["otherData"] == {
        "origin": "measured"
    }
    assert "makespan" in draw("run.json")
    assert Timeline.from_json(Path("run.json").read_text()).origin is timeline.origin


def test_a_theme_colours_the_terminal() -> None:
    """Only where it is asked for."""
    done = CliRunner().invoke(
        app, ["draw", "1f1b", *SIZES, "--theme", "dark"], color=True
    )

    assert "\x1b[" in done.output
    assert "\x1b[" not in draw("1f1b", *SIZES)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["1f1c", *SIZES], 3, "did you mean '1f1b'?"),
        (["1f1b"], 2, "1f1b needs --devices N"),
        (["1f1b", "-d", "4"], 2, "1f1b needs --microbatches N"),
        (["1f1b", *SIZES, "-o", "a.pdf"], 2, "the suffix names no format"),
        (["1f1b", *SIZES, "-o", "no/a.svg"], 2, "cannot be written"),
        (["1f1b", *SIZES, "-o", "a.png"], 2, "make a PNG of an SVG: cairosvg"),
        (["1f1b", "gpipe", *SIZES, "-o", "a.json"], 2, "one timeline"),
        (["1f1b", *SIZES, "--forward", "inf"], 2, "no number of seconds"),
        (["1f1b", *SIZES, "--forward", "-1"], 2, "--forward"),
        (["order.txt", "--devices", "2"], 2, "order.txt is a file"),
        (["bad.txt"], 3, "bad.txt, line 2: '1Q0' is not an op"),
        (["bad.csv"], 3, "bad.csv, line 1"),
        (["bad.json"], 3, "bad.json: not JSON"),
        (["binary.txt"], 3, "binary.txt, line 1: is not text in UTF-8"),
        (["."], 3, ".: cannot be read: Is a directory"),
    ],
)
def test_what_is_wrong_is_said(
    free_dir: Path, arguments: list[str], code: int, words: str
) -> None:
    """Usage ends with 2, what cannot be planned with 3; files with path and line."""
    Path("order.txt").write_text("d0  0F0 0B0 0U\n")
    Path("bad.txt").write_text("d0  0F0\nd1  1Q0\n")
    Path("bad.csv").write_text("0F0,0X0\n")
    Path("bad.json").write_text("{")
    Path("binary.txt").write_bytes(b"\xff\xfe")
    found_code, said = refused(*arguments)

    assert words in said
    assert found_code == code
    assert "Traceback" not in said
