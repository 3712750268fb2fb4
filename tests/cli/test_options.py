"""Options that several commands share are the same in all of them."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
import pytest
import typer

from hocket.cli.check import check_command
from hocket.cli.draw import draw_command
from hocket.cli.main import LazyCommand
from hocket.cli.search import search_command
from hocket.cli.shared.options import (
    Sizes,
    UniformCosts,
    load_schedule,
    with_options,
)
from hocket.cli.simulate import simulate_command
from hocket.errors import PlanError

SIZES = ["devices", "microbatches", "steps", "stages_per_device", "replicas", "shards"]
COSTS = [
    "forward",
    "input_grad",
    "weight_grad",
    "update",
    "message",
    "message_bytes",
    "activation_bytes",
]


@pytest.mark.parametrize("command", [draw_command, simulate_command, search_command])
def test_schedules_and_costs_are_said_alike(command: object) -> None:
    """In this order, after the schedules themselves, and then the command's own."""
    assert callable(command)
    names = list(inspect.signature(command).parameters)
    assert names[1 : 1 + len(SIZES + COSTS)] == SIZES + COSTS
    assert "sizes" not in names
    assert "costs" not in names


def test_a_command_without_costs_has_only_sizes() -> None:
    """`check` runs nothing that would take a time."""
    names = list(inspect.signature(check_command).parameters)
    assert names == ["source", *SIZES, "num_buffers"]


@pytest.mark.parametrize("name", ["draw", "simulate", "search", "check"])
def test_the_shell_sees_them(name: str) -> None:
    """As options with the names and the help that they have in one place."""
    command = LazyCommand(name).load()
    options = {option for one in command.params for option in one.opts}
    assert {"--devices", "-d", "--microbatches", "-m", "--steps"} <= options
    assert ("--forward" in options) == (name != "check")
    assert all(one.help for one in command.params if isinstance(one, click.Option))


def test_shards_are_said_beside_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Orders by name get their gathers, which are counted as ops."""

    def printed(name: str, *arguments: str) -> str:
        command, sizes = LazyCommand(name).load(), ["-d", "2", "-m", "2"]
        command.main([*arguments, *sizes], standalone_mode=False)
        return capsys.readouterr().out

    assert "1f1b: ok" in printed("check", "1f1b", "--shards", "2")
    assert "16 ops" in printed("check", "1f1b", "--shards", "2", "--replicas", "2")
    assert "12 ops" in printed("check", "1f1b", "--replicas", "2")
    assert "makespan 9 s" in printed("draw", "1f1b", "--shards", "2")
    with pytest.raises(PlanError, match="stage 0 has delay 1"):
        printed("check", "wpipe", "--shards", "2")
    with pytest.raises(PlanError, match="gathers are not searched for"):
        printed("search", "1f1b", "--shards", "2")
    file = tmp_path / "order.txt"
    file.write_text("d0  0F0 0B0 0U")
    with pytest.raises(typer.BadParameter, match="--shards is for schedules by name"):
        load_schedule(str(file), Sizes(shards=2))


def test_values_arrive_where_they_belong() -> None:
    """What the shell gives becomes sizes and costs, and the rest stays what it is."""
    reported: list[tuple[Sizes, UniformCosts, int]] = []

    @with_options
    def command(sizes: Sizes, costs: UniformCosts, other: int = 5) -> None:
        """A command."""
        reported.append((sizes, costs, other))

    own = typer.Typer(add_completion=False)
    own.command()(command)
    arguments = ["-d", "4", "--steps", "2", "--update", "0.5", "--other", "7"]
    typer.main.get_command(own).main(arguments, standalone_mode=False)

    ((sizes, costs, other),) = reported
    assert sizes == Sizes(devices=4, steps=2)
    assert costs == UniformCosts(1.0, 1.0, 1.0, 0.5, 0.0, 0, 0)
    assert other == 7
