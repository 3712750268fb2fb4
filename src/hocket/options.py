"""Options of a training run that need no torch: names, defaults and checks, once.

    UpdateOptions                 the section [training] of a recipe
    ScheduleOptions               the section [pipeline] of a recipe
    TrainingConfig(UpdateOptions)                     in `run`, with an optimizer
    PipelineConfig(TrainingConfig, ScheduleOptions)   the arguments of Pipeline

The classes here are mixins without storage of their own, so that a slotted dataclass
can inherit from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from hocket.core.formats.given import is_path
from hocket.core.schedule import Schedule
from hocket.planner.recompute import RecomputeName

CAPTURED_STEP: Final = "ooo-single"  # no order of stages, but of one step's operators

SHORT_WEIGHTS: Final = "bfloat16-weights"  # the model is in bfloat16; has masters

PrecisionName: TypeAlias = Literal["float32", "bfloat16", "float16", "bfloat16-weights"]


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of updates under any schedule.

    Args:
        clip_norm: the largest total norm (2-norm) of all gradients; larger ones are
            scaled down, as `torch.nn.utils.clip_grad_norm_` does it.
        accumulate: batches per update. Each runs in the schedule's order; gradients add
            up over them, weighted by samples.
        precision: the type that forwards compute in: "bfloat16" and "float16" use
            autocast, the latter with a loss scale. Weights keep their types.
            "bfloat16-weights" is for a model in bfloat16: the optimizer steps float32
            copies of its weights (masters), gradients add up in float32.
        ema_decay: keep averaged weights too, which each update moves by `1 - ema_decay`
            of the way to the new ones.
    """

    __slots__ = ()

    clip_norm: float | None = None
    accumulate: int = 1
    precision: PrecisionName = "float32"
    ema_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of the schedule, and of the stages that it runs.

    Args:
        schedule: the name of a registered schedule; or a Schedule (one step that is
            flushed, or steps that overlap, with a repeating body), or the path of a
            file with one (PyTorch's CSV, *.csv, or text, *.txt); or "auto", the fastest
            that fits the memory, as a profile predicts it. "zb-auto" is made for the
            times that are measured on this cluster, and so are the buckets of
            "reverse-first-k", for replicas of one device each. "ooo-single", for one
            device, captures the whole step (see `hocket.compile_step`).
        max_delay: the largest staleness of weights, in updates, that "auto" may choose:
            0 allows orders that flush, 1 also flush-free ones such as PipeDream-2BW.
        num_microbatches: parts of the batch in each replica.
        num_replicas: copies of the pipeline on other workers, each with its part of
            every batch.
        num_shards: the workers that hold each stage of a replica together (FSDP): each
            keeps a part of every weight and of the optimizer's state, gathers the
            whole weights to compute, and trains on its part of the replica's batch.
        stages_per_device: stages on each device, if the schedule has a choice.
        cut: the modules with which stages 1, 2, ... begin; balanced by a profile when
            not given.
        recompute: which stages keep only their input between forward and backward,
            and run the forward once more in the backward: "none", "all", or "auto",
            the fewest that let every device fit its memory. Results stay the same.
        memory_bytes: the memory for tensors on each device, for "auto" and for orders
            that are made for it ("zb-auto", "reverse-first-k"); nine tenths of the
            smallest device's memory when not given. For "ooo-single", the most that
            one step's tensors take, and where layers freeze, the most that a device
            needs in the first layout and in each that follows, as predicted; no limit
            when not given.
        compile: compile each stage before the first step, for the sizes of the
            example's microbatches; other sizes run uncompiled, and so does a stage that
            cannot be compiled, with a warning that says why.
        timeout_s: how long to wait for another worker before an error; what
            `hocket.launch` was given, or 60, when not given.
    """

    __slots__ = ()

    schedule: str | Path | Schedule = "1f1b"
    max_delay: int = 0
    num_microbatches: int = 8
    num_replicas: int = 1
    num_shards: int = 1
    stages_per_device: int | None = None
    cut: Sequence[str] | None = None
    recompute: RecomputeName = "none"
    memory_bytes: int | None = None
    compile: bool = False
    timeout_s: float | None = None

    @property
    def num_pipelines(self) -> int:
        """Pipelines, each of which trains on a part of the batch of its own."""
        return self.num_replicas * self.num_shards


def faults_of(options: object) -> Iterator[str]:
    """Yield a sentence for each option that is not valid, or has no effect.

    Each sentence begins with the option's name.

    Args:
        options: an instance of any of the classes above; other objects have no faults.
    """
    for kind in (UpdateOptions, ScheduleOptions):
        if isinstance(options, kind):
            for name in kind.__annotations__:
                value, default = getattr(options, name), getattr(kind, name)
                if value is None and default is not None:
                    yield f"{name} is None: leave it out, and it is {default!r}"
                yield from value_faults(name, value)
    if isinstance(options, ScheduleOptions):
        yield from _form_faults(options)
        yield from _delay_faults(options)


def captured_step_faults(
    order: ScheduleOptions, updates: UpdateOptions
) -> Iterator[str]:
    """Yield a sentence for each option that a captured step does not go with.

    Args:
        order: asks for the schedule `CAPTURED_STEP`.
        updates: the options of its updates.
    """
    for options, refused in ((order, _NOT_CAPTURED), (updates, _NOT_IN_GRAPH)):
        for name, (works, why) in refused.items():
            value = getattr(options, name)
            if value not in works:
                yield f"{name} is {value!r}: {why}"


def sharding_faults(options: ScheduleOptions, beside: Collection[str]) -> Iterator[str]:
    """Yield one sentence that names all that sharded stages do not go together with.

    Args:
        options: the options of a pipeline.
        beside: the names of others of its options that are used, such as "freeze".
    """
    num = options.num_shards
    if num == 1:
        return
    found = [f"{name}: {_NOT_SHARDED[name]}" for name in beside if name in _NOT_SHARDED]
    if options.schedule == CAPTURED_STEP:
        found.append(f"schedule={CAPTURED_STEP!r}: it is for one device; take '1f1b'")
    if options.max_delay:
        found.append(
            f"max_delay {options.max_delay}: older versions of shards are not kept; "
            "leave it out"
        )
    if found:
        yield (
            f"num_shards {num} does not go together with {', nor with '.join(found)}. "
            f"Or take num_replicas={options.num_pipelines} in place of shards"
        )


_NOT_SHARDED: Final[Mapping[str, str]] = {
    "freeze": "another layout moves whole weights between workers; leave it out",
    "fill": "gathers beside another net's forwards are not measured; leave it out",
    "teacher_lane": "gathers are for one lane of a device; leave it out",
}

# The values that work, and what to do.
_NOT_CAPTURED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "num_microbatches": ((1,), "the batch is not cut; use 1"),
    "num_replicas": ((1,), "it is for one device; for replicas take 'reverse-first-k'"),
    "stages_per_device": ((None, 1), "the model is not cut; leave it out"),
    "cut": ((None,), "the model is not cut; leave it out"),
    "recompute": (("none",), "checkpoint in the model instead, or limit memory_bytes"),
    "compile": ((False,), "the step is one graph already; leave it out"),
}
_NOT_IN_GRAPH: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "clip_norm": (
        (None,),
        "each gradient is freed by its update, before all are there; leave it out, or "
        "take schedule='gpipe'",
    ),
    "accumulate": ((1,), "each batch is a step; use larger batches, or 'gpipe'"),
    "precision": (
        ("float32", "bfloat16"),
        "the graph has neither a loss scale, which needs all gradients before the "
        "first update, nor masters; use 'bfloat16'",
    ),
}


def fixed_cut_faults(*, shapes: bool, caches: bool) -> Iterator[str]:
    """Yield a sentence for each option that `recut=False` does not go with.

    Args:
        shapes: whether other shapes are asked for.
        caches: whether the outputs of frozen layers are to be kept.
    """
    if shapes:
        yield "shapes has no effect without recut: the first shape stays"
    if caches:
        yield (
            "cache does not go together with recut=False: it keeps the outputs of "
            "layers that are together on the first device; leave one of them out"
        )


def freezing_faults(options: ScheduleOptions, *, recut: bool) -> Iterator[str]:
    """Yield a sentence for each option that layers which freeze have no use for.

    Args:
        options: the options of a pipeline whose layers freeze while it trains.
        recut: whether it is cut again then.
    """
    name = options.schedule
    if not isinstance(name, str) or is_path(name):
        yield (
            "an order of your own is for one number of stages: give the schedule's "
            "name, such as '1f1b'"
        )
    elif name == CAPTURED_STEP:
        yield f"schedule={name!r} is one graph: give a name such as '1f1b'"
    elif name in ("auto", "zb-auto"):
        yield f"schedule={name!r} is chosen once: give a name such as '1f1b'"
    if options.stages_per_device not in (None, 1):
        yield f"stages_per_device {options.stages_per_device} must be 1"
    if options.cut is not None and recut:
        yield "cut names the stages of one shape: leave it out, or take recut=False"
    for option, plain in (("compile", False), ("recompute", "none")):
        if getattr(options, option) != plain:
            yield f"{option} does not go together with it: leave it out"


def value_faults(name: str, value: object) -> Iterator[str]:
    """Yield a sentence if a value is not valid, whatever the other options are.

    Args:
        name: the option's name; other names have no faults.
        value: its value; None is no number, which has no limits.
    """
    if name in _LIMITS and value is not None:
        is_valid, sentence = _LIMITS[name]
        kind, what = (Integral, "whole number") if name in _WHOLE else (Real, "number")
        if not isinstance(value, kind) or isinstance(value, bool):
            yield f"{name} is {value!r}: it must be a {what}"
        elif not is_valid(value):
            yield f"{name} is {value}: {sentence}"
    if name in _CHOICES and value not in _CHOICES[name]:
        yield f"{name} is {value!r}: it may be {', '.join(_CHOICES[name])}"


def _form_faults(options: ScheduleOptions) -> Iterator[str]:
    schedule, cut = options.schedule, options.cut
    if not isinstance(schedule, str | Path | Schedule):
        yield f"schedule is {schedule!r}: give a name, a hocket.Schedule, or a path"
    is_list = isinstance(cut, Sequence) and not isinstance(cut, str)
    if cut is not None and not (is_list and all(isinstance(x, str) for x in cut)):
        yield f"cut is {cut!r}: give a list of names, such as ['encoder', 'head']"


def _is_positive(value: float) -> bool:
    return value > 0.0  # NaN is not


def _is_count(value: int) -> bool:
    return value >= 1


_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "precision": get_args(PrecisionName),
    "recompute": get_args(RecomputeName),
}
_AT_LEAST_1: Final = (_is_count, "it must be at least 1")
_LIMITS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "clip_norm": (
        _is_positive,
        "it must be above 0 (leave it out, and no gradient is clipped)",
    ),
    "accumulate": (_is_count, "each update takes 1 batch or more"),
    "ema_decay": (
        lambda x: 0.0 <= x < 1.0,
        "it must be at least 0 and below 1, such as 0.999",
    ),
    "max_delay": (lambda x: x >= 0, "weights are 0 or more updates old"),
    "num_microbatches": _AT_LEAST_1,
    "num_replicas": _AT_LEAST_1,
    "num_shards": _AT_LEAST_1,
    "stages_per_device": _AT_LEAST_1,
    "memory_bytes": _AT_LEAST_1,
    "timeout_s": (_is_positive, "it must be above 0"),
}
_WHOLE: Final = _LIMITS.keys() - {"clip_norm", "ema_decay", "memory_bytes", "timeout_s"}


def _delay_faults(options: ScheduleOptions) -> Iterator[str]:
    if options.max_delay and options.schedule != "auto":
        yield (
            f"max_delay {options.max_delay} has no effect unless schedule is 'auto': "
            "any other schedule says itself how old its weights are"
        )
