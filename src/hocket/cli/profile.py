"""`hocket profile`: measures each layer of a recipe's model on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hocket.cli.shared.options import JsonOption
from hocket.cli.shared.output import folded, num_columns
from hocket.cli.train import (
    LayoutOption,
    OutsideOption,
    RecipeArgument,
    SetOption,
    WorkersOption,
    recipe_here,
    run_workers,
    with_workers,
)
from hocket.draw.quantity import byte_size, percent, seconds

if TYPE_CHECKING:
    from hocket.model.profile.profile import Profile

ENTRY: Final = "hocket.recipes.training.train:profile"


def profile_command(
    recipe: RecipeArgument,
    settings: SetOption = None,
    workers: WorkersOption = None,
    layout: LayoutOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again, and keep that instead.")
    ] = False,
    allow_outside: OutsideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a recipe's model, layer by layer.

    All workers measure at the same time, as they will train. The profile is kept
    (run.profile_folder), and training on this machine uses it.
    """
    settings = with_workers(settings, workers, layout)
    resolved = recipe_here(recipe, settings, allow_outside=allow_outside)
    num_workers = resolved.recipe.pipeline.num_workers
    result = run_workers(ENTRY, resolved, num_workers, again)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        typer.echo("\n".join(report(result)))


def report(result: dict[str, Any]) -> Iterator[str]:
    """Return the profile as text."""
    from hocket.model.profile.profile import Profile

    profile = Profile.from_json(result["profile"])
    conditions = profile.conditions
    yield (
        f"{result['recipe']} on {conditions['device_name']}, one microbatch of "
        f"{conditions['num_samples']}; threads per worker: {conditions['num_threads']}"
    )
    yield ""
    yield from folded(layer_rows(profile, result["stages"]), num_columns())
    yield ""
    yield (
        f"a step: {seconds(result['step_s'])} predicted, bubble "
        f"{percent(result['bubble_fraction'])}"
    )
    if result["path"] is None:
        why = profile.noise or "not all code that the loss reaches is known"
        yield f"the profile is not kept: {why}"
        return
    verb = "was kept" if result["was_kept"] else "is kept now"
    yield f"the profile {verb} in {result['path']}"


# The columns after a layer's stage: what stands above, and which of its numbers.
_NUMBERS: Final = (
    ("forward", seconds, "forward_s"),
    ("±", seconds, "forward_spread_s"),
    ("input grad", seconds, "input_grad_s"),
    ("weight grad", seconds, "weight_grad_s"),
    ("±", seconds, "backward_spread_s"),
    ("activations", byte_size, "activation_bytes"),
    ("received", byte_size, "received_bytes"),
)


def layer_rows(profile: Profile, stages: list[int]) -> Iterator[tuple[str, ...]]:
    """Return one row per layer; a stage's first layer is marked with its number."""
    yield ("layer", "stage", *(head for head, _, _ in _NUMBERS))
    for number, layer in enumerate(profile.layers):
        stage = str(stages.index(number)) if number in stages else ""
        numbers = (text(getattr(layer, name)) for _, text, name in _NUMBERS)
        yield (layer.name, stage, *numbers)
