"""`hocket simulate` prints the numbers of the predicted timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.core.costs import Costs, StageCost
from hocket.core.formats.costs_json import to_json
from hocket.draw.quantity import byte_size
from tests.draw.timelines import REAL, measured, simulated

_LANES = "lane bubble peak microbatches, F to W peak activations, F to I"


def simulate(*arguments: str) -> str:
    """What a call prints that succeeds."""
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def numbers_of(*arguments: str) -> dict[str, Any]:
    """The numbers that `--json` prints."""
    numbers: dict[str, Any] = json.loads(simulate(*arguments, "--json"))
    return numbers


@given(p=st.integers(1, 6), m=st.integers(1, 12))
def test_1f1b_has_the_bubble_and_the_memory_of_the_paper(p: int, m: int) -> None:
    """(p - 1) / (m + p - 1), and p - w microbatches alive on device w."""
    numbers = numbers_of("1f1b", "-d", str(p), "-m", str(m))

    assert numbers["makespan_s"] == pytest.approx(3.0 * (m + p - 1))
    assert numbers["bubble_fraction"] == pytest.approx((p - 1) / (m + p - 1))
    peaks = [device["peak_activations"] for device in numbers["devices"]]
    assert peaks == [min(p - w, m) for w in range(p)]


def test_the_table_says_what_is_in_it() -> None:
    """Makespan, bubble per lane, in all and steady, peaks, and bytes per link."""
    sizes = ("1f1b", "-d", "2", "-m", "4", "--steps", "2")
    bytes_ = ("--message-bytes", "1048576", "--activation-bytes", "1048576")
    words = [" ".join(line.split()) for line in simulate(*sizes, *bytes_).splitlines()]
    peak_bytes = numbers_of(*sizes, *bytes_)["devices"][0]["peak_bytes"]

    assert "makespan 30 s" in words
    assert "step 15 s" in words
    assert "bubble 20.0 %" in words
    assert _LANES + " peak bytes of tensors" in words
    assert f"d0 20.0 % 2 2 {byte_size(peak_bytes)}" in words
    assert "d0 to d1 8 MiB" in words


def test_what_lives_until_w_comes_first() -> None:
    """ZB-H1 holds 4 on each of 4 devices, of which 4, 3, 2 and 1 wait for their I."""
    sizes = ("zb-h1", "-d", "4", "-m", "8")
    words = [" ".join(line.split()) for line in simulate(*sizes).splitlines()]
    first = words.index(_LANES) + 1
    devices = numbers_of(*sizes)["devices"]

    assert [x["peak_microbatches"] for x in devices] == [4, 4, 4, 4]
    assert [x["peak_activations"] for x in devices] == [4, 3, 2, 1]
    found = [line.split()[-2:] for line in words[first : first + 4]]
    assert found == [["4", "4"], ["4", "3"], ["4", "2"], ["4", "1"]]


def test_links_carry_each_message_once() -> None:
    """`m` messages of one size each way over every border, each step."""
    arguments = ("1f1b", "-d", "3", "-m", "4", "--steps", "2", "--message-bytes", "10")
    links = numbers_of(*arguments)["links"]

    assert {(link["from_device"], link["to_device"]) for link in links} == {
        (0, 1),
        (1, 0),
        (1, 2),
        (2, 1),
    }
    assert {link["num_bytes"] for link in links} == {2 * 4 * 10}


def test_a_measured_timeline_is_reported_as_it_is(free_dir: Path) -> None:
    """A run's own numbers, without a simulation."""
    timeline = measured(simulated("1f1b", 2, 4, costs=REAL))
    Path("run.json").write_text(timeline.to_json())
    numbers = numbers_of("run.json")

    assert numbers["origin"] == "measured"
    assert numbers["makespan_s"] == timeline.makespan_s
    assert numbers["devices"][0]["peak_bytes"] == timeline.peak_bytes(0)


def test_numbers_that_a_schedule_refuses_are_said_with_those_it_takes() -> None:
    """1F1B has one stage per device."""
    arguments = ["simulate", "1f1b", "-d", "4", "-m", "6", "--stages-per-device", "2"]
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 3
    assert "stages_per_device=2" in done.output


def test_an_order_that_is_made_for_times_is_made_for_these() -> None:
    """Short weight gradients leave gaps that forwards fill; long ones do not."""
    sizes = ("-d", "4", "-m", "12")
    times = ("--weight-grad", "0.25")
    found = numbers_of("zb-auto", *sizes, *times)
    by_hand = numbers_of("zb-h2", *sizes, *times)

    assert numbers_of("zb-auto", *sizes) == numbers_of("zb-h2", *sizes)
    assert found["makespan_s"] < by_hand["makespan_s"]


def test_idle_time_has_causes() -> None:
    """They add up to the bubble, for all lanes and each; the text names them."""
    numbers = numbers_of("1f1b", "-d", "4", "-m", "8", "--message", "0.25")
    makespan_s = numbers["makespan_s"]
    total = sum(numbers["idle_s"].values()) / makespan_s

    assert total == pytest.approx(numbers["bubble_fraction"])
    for lane in numbers["lanes"]:
        share = sum(lane["idle_s"].values()) / makespan_s
        assert share == pytest.approx(lane["bubble_fraction"])
    text = simulate("1f1b", "-d", "4", "-m", "8", "--message", "0.25")
    assert "warm-up and drain" in text
    assert "messages take" in text


def test_what_if_changes_the_costs_of_a_file(tmp_path: Path) -> None:
    """`--costs` gives the devices; --slow and --jitter change what they take."""
    stage = StageCost(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    (tmp_path / "costs.json").write_text(to_json(Costs((stage,) * 3)))
    given = ("gpipe", "-m", "8", "--costs", str(tmp_path))

    assert numbers_of(*given)["makespan_s"] == pytest.approx(30.0)
    slow = numbers_of(*given, "--slow", "rank=1:1.5")
    assert slow["makespan_s"] == pytest.approx(42.0)
    text = simulate(*given, "--slow", "rank=1:1.5", "--jitter", "0")
    assert "a step of 42 s instead of 30 s, +40.0 %" in text
    assert "stage 1 is 28.6 % longer than the mean" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--slow", "1.2"), "write rank=1:1.2"),
        (("--link", "0-1:fast"), "write 0-1:10Gb/s"),
        (("--link", "0-9:1Gb/s"), "there is no device 9"),
        (("--costs", "nowhere"), "does not exist"),
    ],
)
def test_a_what_if_that_cannot_be_says_how(more: tuple[str, ...], words: str) -> None:
    """One sentence, with an example."""
    done = CliRunner().invoke(app, ["simulate", "1f1b", "-d", "2", "-m", "2", *more])
    assert done.exit_code
    assert words in " ".join(done.output.split())
