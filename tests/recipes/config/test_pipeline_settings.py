"""The section [pipeline]: layouts, and orders with old weights."""

from __future__ import annotations

import pytest

from hocket.errors import RecipeError
from hocket.recipes.config.resolve import resolve
from hocket.recipes.config.sections import PipelineSettings

NO_NUMBERS = (
    "pipeline.num_workers=",
    "pipeline.num_replicas=",
    "pipeline.num_shards=",
)


def pipeline(*settings: str) -> PipelineSettings:
    """What the recipe says of its pipeline."""
    return resolve("digits-vit", settings).recipe.pipeline


def fault(*settings: str) -> str:
    """Why it is refused."""
    with pytest.raises(RecipeError) as caught:
        pipeline(*settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "num_workers", "num_replicas"),
    [("8x1", 8, 1), ("4x2", 8, 2), ("2x4", 8, 4)],
)
def test_a_layout_says_workers_and_replicas(
    word: str, num_workers: int, num_replicas: int
) -> None:
    """In the place of both numbers; and what is written down reads back."""
    resolved = resolve("digits-vit", [*NO_NUMBERS, f"pipeline.layout={word}"])
    found = resolved.recipe.pipeline
    assert (found.num_workers, found.num_replicas) == (num_workers, num_replicas)
    text = resolved.to_toml()
    assert f'layout = "{word}"' in text
    assert f"num_workers = {num_workers}" in text


def test_a_layout_may_stand_beside_the_same_numbers() -> None:
    """As torchrun's number of workers does."""
    found = pipeline("pipeline.layout=2x1")  # the recipe says num_workers = 2
    assert (found.num_workers, found.num_replicas) == (2, 1)


def test_contradictions_are_reported_with_the_way_out() -> None:
    """Both sides' numbers, and how each of them is taken away."""
    reported = fault("pipeline.layout=4x2")
    assert "layout 4x2 is 8 workers in 2 replicas, but num_workers is 2" in reported
    assert "--layout replaces these numbers" in reported
    assert "--set pipeline.layout= takes the layout away" in reported
    reported = fault("pipeline.layout=1x2", "pipeline.num_replicas=1")
    assert (
        "2 workers in 2 replicas, but num_workers is 2 and num_replicas 1" in reported
    )
    assert "'4y2' is no layout" in fault("pipeline.layout=4y2")


def test_a_third_number_says_shards() -> None:
    """Workers are a multiple of replicas x shards; each trains on a part of a batch."""
    found = pipeline(*NO_NUMBERS, "pipeline.layout=2x1x2")
    assert (found.num_workers, found.num_replicas, found.num_shards) == (4, 1, 2)
    assert (found.num_devices, found.num_pipelines) == (2, 2)
    assert pipeline("pipeline.num_shards=2").num_devices == 1  # 2 workers
    three = fault("pipeline.num_workers=6", "pipeline.num_shards=4")
    assert "num_workers 6 is not a multiple of num_replicas 1 x num_shards 4" in three
    both = fault("pipeline.layout=1x2", "pipeline.num_shards=2")
    assert "in 2 replicas of 1 shards, but num_workers is 2 and num_replicas 2" in both
    assert "num_shards 2" in both
    small = fault("pipeline.num_shards=2", "training.batch_size=15")
    assert (
        "batch_size 15 is less than one sample for each of pipeline.num_replicas 1 x "
        "pipeline.num_shards 2 x pipeline.num_microbatches 8"
    ) in small
    least = pipeline("pipeline.num_shards=2", "training.batch_size=16")
    assert least.num_pipelines * least.num_microbatches == 16


def test_what_is_not_sharded_is_refused_in_one_sentence() -> None:
    """With what to leave out, and with replicas as the way out."""
    reported = fault(
        "pipeline.num_shards=2",
        "pipeline.schedule=auto",
        "pipeline.max_delay=1",
        "freeze.policy=alpha",
    )
    assert "pipeline.num_shards 2 does not go together with freeze: another" in reported
    assert "nor with max_delay 1: older versions of shards" in reported
    assert "take num_replicas=2 in place of shards" in reported
    captured = fault("pipeline.num_shards=2", "pipeline.schedule=ooo-single")
    assert "with schedule='ooo-single': it is for one device" in captured
    stale = fault("pipeline.num_shards=2", "pipeline.schedule=wpipe")
    assert "pipeline.schedule: the program has num_shards=2, but stage 0 has" in stale
    copies = fault(*NO_NUMBERS, "pipeline.layout=2x1x2", "pipeline.schedule=chimera")
    assert "'chimera' has no order of sharded stages, and was asked for" in copies


@pytest.mark.parametrize(
    "name", ["wpipe", "wpipe-overlapped", "pipedream-2bw", "pipedream"]
)
def test_every_order_without_a_flush_can_be_asked_for(name: str) -> None:
    """By its name, with the microbatches that it takes."""
    num_microbatches = 1 if name == "pipedream" else 8
    found = pipeline(
        f"pipeline.schedule={name}",
        f"pipeline.num_microbatches={num_microbatches}",
    )
    assert found.schedule == name


def test_too_few_microbatches_name_the_number_that_works() -> None:
    """Of WPipe, as many as devices; of its overlapped form, nearly twice as many."""
    eight = (*NO_NUMBERS, "pipeline.layout=8x1", "pipeline.num_microbatches=4")
    assert "needs 8 microbatches" in fault("pipeline.schedule=wpipe", *eight)
    reported = fault("pipeline.schedule=wpipe-overlapped", *eight)
    assert "needs 14 microbatches" in reported


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("pipeline.max_delay=1",), "no effect unless schedule is 'auto'"),
        (("pipeline.correction=lr-discount",), "pipeline.correction: "),
        (("pipeline.num_discounted_updates=9",), "pipeline.num_discounted_updates: "),
    ],
)
def test_what_has_no_effect_is_refused(settings: tuple[str, ...], words: str) -> None:
    """Rather than believed in."""
    assert words in fault(*settings)


def test_an_invalid_option_is_reported_with_its_line() -> None:
    """By its own key, although the check is the Pipeline's."""
    reported = fault("pipeline.num_microbatches=0", "training.accumulate=0")
    assert "pipeline.num_microbatches: num_microbatches is 0: it must be" in reported
    assert "training.accumulate: accumulate is 0: each update takes 1 batch" in reported
    assert reported.count("(--set)") == 2


def test_memory_has_an_effect_on_orders_that_are_made_for_it() -> None:
    """zb-auto fits the memory, as "auto" does; other orders do not look at it."""
    memory = "pipeline.memory_bytes=1000000"
    assert pipeline("pipeline.schedule=zb-auto", memory).memory_bytes == 1000000
    assert "memory_bytes 1000000 has no effect" in fault(memory)


def test_auto_may_be_allowed_old_weights() -> None:
    """Never by itself."""
    assert pipeline("pipeline.schedule=auto").max_delay == 0
    assert pipeline("pipeline.schedule=auto", "pipeline.max_delay=1").max_delay == 1
