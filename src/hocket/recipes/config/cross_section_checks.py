"""Checks values of several sections of a recipe against each other.

Checks the sections [teacher] and [teacher_model] against the other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hocket.core.check import check
from hocket.core.formats.given import is_path, read_schedule, refuse_other_sizes
from hocket.core.op import SHARDING
from hocket.core.schedule import Schedule
from hocket.errors import PlanError
from hocket.freeze.shapes import shapes_of
from hocket.options import (
    CAPTURED_STEP,
    captured_step_faults,
    fixed_cut_faults,
    freezing_faults,
    sharding_faults,
)
from hocket.passes.add_gathers import add_gathers
from hocket.recipes.config.sections import PipelineSettings, Sections
from hocket.recipes.config.settings import (
    AnyTeacher,
    DistilbertSettings,
    FreezeSettings,
    TwoViewSettings,
)
from hocket.schedules import make_schedule, options_of


def cross_section_faults(recipe: Sections) -> Iterator[str]:
    """Yield a sentence for each fault, with the numbers of both sections."""
    yield from teacher_faults(recipe)
    has_loss = recipe.task.loss is not None or recipe.teacher is not None
    if recipe.data.kind == "function" and not has_loss:
        yield (
            "task.loss: missing: data of kind 'function' bring no loss along; name "
            "one, as 'module:function'"
        )
    yield from _too_small(recipe)
    freezes = isinstance(recipe.freeze, FreezeSettings)
    for fault in sharding_faults(recipe.pipeline, ["freeze"] if freezes else []):
        yield f"pipeline.{fault}"
    if recipe.pipeline.schedule == CAPTURED_STEP:
        yield from _not_captured(recipe)
    elif recipe.pipeline.schedule != "auto":
        yield from _misfits(recipe.pipeline)
    yield from _freezing_faults(recipe)


def _too_small(recipe: Sections) -> Iterator[str]:
    """Check that each microbatch gets a sample."""
    pipeline, batch_size = recipe.pipeline, recipe.training.batch_size
    num, num_shards = pipeline.num_microbatches, pipeline.num_shards
    if batch_size < pipeline.num_pipelines * num:
        shards = f"pipeline.num_shards {num_shards} x " if num_shards > 1 else ""
        yield (
            f"training.batch_size {batch_size} is less than one sample "
            f"for each of pipeline.num_replicas {pipeline.num_replicas} x "
            f"{shards}pipeline.num_microbatches {num}"
        )


def _not_captured(recipe: Sections) -> Iterator[str]:
    pipeline = recipe.pipeline
    faults = [*captured_step_faults(pipeline, recipe.training)]
    if pipeline.num_workers > 1:
        faults.insert(0, f"num_workers is {pipeline.num_workers}: it is for one device")
    if recipe.teacher is not None:
        faults.append("a teacher runs in the gaps of a pipeline")
    yield from (f"pipeline.schedule {CAPTURED_STEP!r}: {fault}" for fault in faults)


def _misfits(pipeline: PipelineSettings) -> Iterator[str]:
    """Check the numbers of devices, microbatches and cuts against the schedule."""
    try:
        schedule = _order(pipeline)
    except PlanError as error:
        yield f"pipeline.schedule: {error}"
        return
    num_stages = schedule.program.num_stages
    if pipeline.cut is not None and len(pipeline.cut) != num_stages - 1:
        yield (
            f"pipeline.cut names {len(pipeline.cut)} modules; the schedule has "
            f"{num_stages} stages, of which all but the first begin with one"
        )


def _freezing_faults(recipe: Sections) -> Iterator[str]:
    """Check what needs layers that freeze, and what does not go together with them."""
    pipeline, freezing = recipe.pipeline, recipe.freeze
    fits_memory = (
        "memory_bytes" in options_of(pipeline.schedule)
        or pipeline.schedule == CAPTURED_STEP
        or "auto" in (pipeline.recompute, pipeline.schedule)
        or isinstance(freezing, FreezeSettings)
    )
    if pipeline.memory_bytes and not fits_memory:
        yield (
            f"pipeline.memory_bytes: memory_bytes {pipeline.memory_bytes} has no "
            "effect unless recompute or schedule is 'auto', or the schedule is made "
            "for it, as 'zb-auto' is, or layers freeze"
        )
    if isinstance(freezing, FreezeSettings):
        faults = [*freezing_faults(pipeline, recut=freezing.recut)]
        if not freezing.recut:
            faults += fixed_cut_faults(
                shapes=bool(freezing.shapes), caches=recipe.cache is not None
            )
        for fault in faults:
            yield f"freeze: {fault} (--set freeze.policy=none freezes nothing)"
        yield from _shape_faults(freezing, pipeline)
        if recipe.teacher is not None:
            yield "freeze: a section [teacher] does not go together with it"
    elif recipe.cache is not None:
        yield "cache: has no effect without layers that freeze: say freeze.policy"


def _shape_faults(
    freezing: FreezeSettings, pipeline: PipelineSettings
) -> Iterator[str]:
    num_parts = pipeline.num_microbatches * pipeline.num_pipelines
    possible = [*map(str, shapes_of(pipeline.num_workers, num_parts))]
    wrong = [x for x in (freezing.shapes or {}).values() if x not in possible]
    if wrong:
        yield (
            f"freeze.shapes: {', '.join(wrong)} cannot be: {pipeline.num_workers} "
            f"workers with {num_parts} microbatches in the whole batch can be "
            f"{', '.join(possible)} (stages x replicas)"
        )


def _order(pipeline: PipelineSettings) -> Schedule:
    copies = {"num_replicas": pipeline.num_replicas, "num_shards": pipeline.num_shards}
    if not is_path(pipeline.schedule):
        return make_schedule(
            pipeline.schedule,
            num_devices=pipeline.num_devices,
            num_microbatches=pipeline.num_microbatches,
            stages_per_device=pipeline.stages_per_device,
            **copies,
        )
    order = read_schedule(Path(pipeline.schedule), **copies)
    refuse_other_sizes(
        order.program,
        num_devices=pipeline.num_devices,
        num_microbatches=pipeline.num_microbatches,
        has_body=bool(order.body),
        **copies,
    )
    if order.kinds.isdisjoint(SHARDING):
        order = add_gathers(order)
    check(order)
    return order


def teacher_faults(recipe: Sections) -> Iterator[str]:
    """Yield a sentence for each fault of a recipe's teacher."""
    if recipe.teacher is not None:
        yield from _model_faults(recipe, recipe.teacher)
        if recipe.task.loss is not None:
            yield (
                "task.loss: has no effect with a section [teacher], whose kind is a "
                "loss"
            )
    elif recipe.teacher_model is not None:
        yield "teacher_model: has no effect without a section [teacher]"
    reads_own = recipe.data.kind == "function"
    if isinstance(recipe.teacher, DistilbertSettings) and not reads_own:
        yield f"teacher.kind 'distilbert' reads masked text, not {recipe.data.kind!r}"
    if isinstance(recipe.teacher, TwoViewSettings):
        yield from _two_view_faults(recipe, recipe.teacher)


def _model_faults(recipe: Sections, teacher: AnyTeacher) -> Iterator[str]:
    """Check that a teacher has a model, and weights where it is frozen."""
    has_model = recipe.teacher_model is not None
    if not teacher.moves and teacher.weights is None and not has_model:
        yield (
            "teacher.weights: missing: name the folder of a run with checkpoints "
            "(--set teacher.weights=FOLDER), or give a section [teacher_model]; or let "
            'the teacher follow the student (update = "momentum")'
        )
    if teacher.moves and has_model:
        yield (
            f"teacher_model: has no effect with teacher.update {teacher.update!r}: the "
            "teacher begins as a copy of the student"
        )


def _two_view_faults(recipe: Sections, teacher: TwoViewSettings) -> Iterator[str]:
    """Check that there are images for two views, and that the teacher moves."""
    if recipe.data.kind != "function":
        yield (
            f"teacher.kind {teacher.kind!r} reads two views of colour images, not "
            f"{recipe.data.kind!r}"
        )
    if not teacher.moves:
        yield (
            f"teacher.update 'frozen': with teacher.kind {teacher.kind!r} the teacher "
            "follows the student: say 'momentum'"
        )
    for name in ("metrics", "evaluate"):
        if getattr(recipe.task, name) is not None:
            yield (
                f"task.{name}: has no effect with teacher.kind {teacher.kind!r}, whose "
                "features are evaluated by k-NN"
            )
