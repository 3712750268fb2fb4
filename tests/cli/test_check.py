"""`hocket check` proves a schedule, or says everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.schedules import make_schedule


def check(*arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    done = CliRunner().invoke(app, ["check", *arguments])
    assert "Traceback" not in done.output
    return done.exit_code, done.output


def test_a_good_file_is_ok_and_it_says_what_was_proved(free_dir: Path) -> None:
    """All ops, no deadlock, and the versions of the weights."""
    schedule = make_schedule("1f1b", num_devices=4, num_microbatches=8)
    Path("order.txt").write_text(str(schedule))
    code, said = check("order.txt")

    assert code == 0
    assert said.startswith("order.txt: ok\n")
    assert "68 ops: all that 8 microbatches need on 4 stages of 4 devices" in said
    assert "1 receive buffer per flow" in said
    assert "at most 1 version" in said


def test_a_name_can_be_checked() -> None:
    """With the sizes of the options."""
    code, said = check("interleaved-1f1b", "-d", "2", "-m", "4", "--steps", "3")

    assert code == 0
    assert "4 stages of 2 devices in 3 steps" in said


def test_faults_are_all_said_with_the_picture(free_dir: Path) -> None:
    """A doubled op and a missing one, both, and where they stand; exit code 1."""
    Path("order.txt").write_text("d0  0F0 0F0 0F1 0B1 0U\nd1  1F0 1B0 1F1 1B1 1U\n")
    code, said = check("order.txt")

    assert code == 1
    assert said.startswith("order.txt: not ok\n")
    assert "0F0 is there 2 times" in said
    assert "0B0 is missing" in said
    assert "d0  ! 0F0 ! 0F0 0F1 0B1 0U" in said


def test_a_deadlock_shows_where_each_lane_stands(free_dir: Path) -> None:
    """Device 1 wants to go back before it went forward."""
    Path("order.txt").write_text("d0  0F0 0B0 0U\nd1  1B0 1F0 1U\n")
    code, said = check("order.txt")

    assert code == 1
    assert "no lane can move" in said
    assert "d1  > 1B0 1F0 1U" in said


def test_too_few_buffers_are_a_fault() -> None:
    """An order that needs more room at the receiver than there is."""
    assert check("1f1b", "-d", "2", "-m", "4", "--buffers", "1")[0] == 0
    assert check("1f1b", "-d", "2", "-m", "4", "--buffers", "0")[0] == 2


def test_a_malformed_file_is_said_with_path_and_line(free_dir: Path) -> None:
    """What cannot be read cannot be checked: not the exit code of a fault."""
    Path("order.txt").write_text("# mine\nd0  0F0 0Q0\n")
    code, said = check("order.txt")

    assert code == 3
    assert "order.txt, line 2: '0Q0' is not an op" in said


def test_a_csv_is_reported_cell_by_cell(free_dir: Path) -> None:
    """torch's files have cells: a weight gradient that is there twice, and one not."""
    Path("order.csv").write_text("0F0,0F1,0I0,0W0,0I1,0W0\n1F0,1B0,1F1,1B1\n")
    code, said = check("order.csv")

    assert code == 1
    assert said.startswith("order.csv: not ok\n")
    assert "order.csv, line 1, cell 6: 0W0 is there again" in said
    assert "cell 5: for microbatch 1, stage 0 has 0F1 0I1; expected 0F1 0B1" in said
