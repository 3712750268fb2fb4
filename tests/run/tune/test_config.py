"""The arguments of a pipeline are the fields of its configuration, checked once."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import ConfigError
from hocket.options import ScheduleOptions, UpdateOptions
from hocket.recipes.config.sections import PipelineSettings, TrainingSettings


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Any optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def small_model() -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


BATCH = (torch.ones(8, 2), torch.zeros(8, 2))


def small_config(**options: Any) -> hocket.PipelineConfig:
    """A configuration of one device."""
    return hocket.PipelineConfig(
        small_model(),
        nn.functional.mse_loss,
        optimizer=sgd,
        example=BATCH,
        **{"num_microbatches": 2, **options},
    )


def test_what_is_not_sharded_is_refused_in_one_sentence() -> None:
    """Each by its name, with what to leave out, and with replicas as the way out."""
    frozen = {"freeze": hocket.freeze.Alpha(0.5), "schedule": "ooo-single"}
    fill = hocket.Fill(small_model().eval(), [torch.ones(2)], print)
    with pytest.raises(ConfigError) as caught:
        small_config(num_shards=2, num_replicas=3, **frozen)
    assert str(caught.value) == (
        "num_shards 2 does not go together with freeze: another layout moves whole "
        "weights between workers; leave it out, nor with schedule='ooo-single': it is "
        "for one device; take '1f1b'. Or take num_replicas=6 in place of shards"
    )
    with pytest.raises(ConfigError, match="with fill: gathers beside"):
        small_config(num_shards=2, fill=fill)
    with pytest.raises(ConfigError, match="with max_delay 1: older versions"):
        small_config(num_shards=2, schedule="auto", max_delay=1)
    assert small_config(num_shards=2).num_parts == 4


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_microbatches", "8", "'8': it must be a whole number"),
        ("num_replicas", 1.5, "1.5: it must be a whole number"),
        ("accumulate", True, "True: it must be a whole number"),
        ("num_shards", None, "None: leave it out, and it is 1"),
        ("memory_bytes", "8GiB", "'8GiB': it must be a number"),
        ("clip_norm", "1", "'1': it must be a number"),
        ("seed", "a", "'a': it must be a whole number"),
        ("schedule", 5, "5: give a name, a hocket.Schedule, or a path"),
        ("cut", "head", "'head': give a list of names"),
        ("cut", 2, "2: give a list of names"),
        ("cut", ["2", 3], "['2', 3]: give a list of names"),
        ("compile", 3, "3: it must be True or False"),
        ("recut", "no", "'no': it must be True or False"),
        ("teacher_lane", 1, "1: it must be True or False"),
        ("profile_dir", 3, "3: give the path of a folder"),
        ("run_dir", ["a"], "['a']: give the path of a folder"),
        ("world", 3, "3: give what hocket.join_world() returns"),
        ("teachers", 3, "3: give hocket.Teacher(net)s by name, in a dict"),
        ("transport", "shm", "'shm': it may be auto, shared-memory, torch"),
    ],
)
def test_options_of_another_type_are_named(name: str, value: Any, said: str) -> None:
    """Rather than compared, which would fail with an error of Python's."""
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(said)}"):
        small_config(**{name: value})


def test_pipeline_takes_the_fields_of_its_config() -> None:
    """Editors and `help` show the arguments by name, with types and defaults."""
    config = signature(hocket.PipelineConfig).parameters
    assert signature(hocket.Pipeline).parameters == config
    assert [*config][:2] == ["model", "loss"]
    assert len(config) == len(fields(hocket.PipelineConfig)) == 36


def test_plan_takes_the_fields_of_its_config() -> None:
    """And what it needs to know of the model."""
    known, config = signature(hocket.plan), signature(hocket.PlanConfig).parameters
    assert known.return_annotation == "Ranking"
    assert known.parameters.items() > config.items()
    assert [*known.parameters][:3] == ["model", "batch", "loss"]
    options: dict[str, Any] = {"num_device": 2}
    said = "plan takes no argument 'num_device'; did you mean 'num_devices'?"
    with pytest.raises(ConfigError, match=re.escape(said)):
        hocket.plan(small_model(), BATCH, **options)


def test_names_the_nearest_argument_for_an_unknown_one() -> None:
    """Before the job is joined."""
    options: dict[str, Any] = {"num_microbatch": 4}
    said = "takes no argument 'num_microbatch'; did you mean 'num_microbatches'?"
    with pytest.raises(ConfigError, match=re.escape(said)):
        hocket.Pipeline(
            small_model(),
            nn.functional.mse_loss,
            optimizer=sgd,
            example=BATCH,
            **options,
        )


def test_refuses_all_invalid_options_at_once() -> None:
    """Also those of different groups."""
    said = "accumulate is 0.*; num_microbatches is 0.*; max_delay 1 has no effect"
    with pytest.raises(ConfigError, match=said):
        small_config(accumulate=0, num_microbatches=0, max_delay=1)


@pytest.mark.parametrize(
    ("options", "section"),
    [(ScheduleOptions, PipelineSettings), (UpdateOptions, TrainingSettings)],
)
def test_recipes_have_the_same_keys(
    options: type[Any], section: type[PipelineSettings | TrainingSettings]
) -> None:
    """With the same defaults; but recipes start workers, so they know a timeout."""
    known, keys = signature(hocket.PipelineConfig).parameters, section.model_fields
    for option in fields(options):
        default = 60.0 if option.name == "timeout_s" else known[option.name].default
        assert keys[option.name].default == default


@pytest.mark.timeout(60)
def test_a_pipeline_from_a_config_trains_alike() -> None:
    """A configuration may be changed, and used for several pipelines."""
    config = small_config()
    other = replace(config, model=small_model(), schedule="gpipe")
    losses = []
    for made in (config, other):
        with hocket.Pipeline.from_config(made) as pipeline:
            assert pipeline.plan.schedule_name == made.schedule
            losses.append([pipeline.step(BATCH).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_how_to_train_keeps_no_model() -> None:
    """Workers keep it as long as they train; the uncut model is freed before."""
    config = small_config(clip_norm=1.0)
    model, training = weakref.ref(config.model), config.training
    assert training.clip_norm == 1.0
    del config
    gc.collect()
    assert model() is None
