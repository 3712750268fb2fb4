"""The stages of one teacher: where they are cut, and on which devices they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn

from hocket.core.program import Stage
from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.profile.profile import Profile
from hocket.model.stages.cut import check_as_is, cut
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.state import saved_tensors
from hocket.run.data.batch import BatchOutput, Microbatch, on_device
from hocket.run.engine.programs.net_setup import NetSetup
from hocket.run.stage.net_output import NetOutput, example_of
from hocket.run.tune.teachers.teacher import Teacher

_NUM_SHOWN: Final = 3  # faults in an error


@dataclass(frozen=True, slots=True)
class KnownTeacher:
    """A teacher that is captured and profiled, before it is cut.

    Args:
        name: its name.
        teacher: the user's argument.
        captured: its captured model.
        profile: the seconds of its layers' forwards, the mean over the workers.
        output: its output for the example.
        num_microbatches: its microbatches in each replica.
    """

    name: str
    teacher: Teacher
    captured: Captured
    profile: Profile
    output: Any
    num_microbatches: int

    def output_for_loss(
        self, microbatch: Microbatch, batch_size: int, *, over_batch: bool
    ) -> Any:
        """Return what the loss of the example's first microbatch reads of this teacher.

        Args:
            microbatch: the first of the batch; the result is on its device.
            batch_size: samples of the batch.
            over_batch: whether the loss is over the whole batch (op L).
        """
        is_whole = self.teacher.whole_batch and not over_batch
        num_samples = batch_size if is_whole else microbatch.num_samples
        known = self.captured.example.num_samples
        device = tensors_in((microbatch.leaves, microbatch.targets))[0].device
        output = on_device(example_of(self.output, known, num_samples), device)
        if not is_whole:
            return output
        rows = torch.arange(microbatch.num_samples, device=device)
        return BatchOutput(output, rows)

    @property
    def layer_s(self) -> list[float]:
        """Seconds of each layer in a step."""
        each = (layer.forward_s for layer in self.profile.layers)
        return [self.num_microbatches * forward_s for forward_s in each]


@dataclass(frozen=True, slots=True)
class TeacherPlaces:
    """Where the stages of a teacher are.

    Args:
        boundaries: the layers at which its stages but the first begin.
        devices: the device of each stage.
        follows: for each stage, the student's stage that it follows, counted in the
            student; empty for a frozen teacher.
    """

    boundaries: tuple[int, ...]
    devices: tuple[int, ...]
    follows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CutTeacher:
    """A teacher that is cut into stages.

    Args:
        known: the captured and profiled teacher.
        places: where its stages are.
        modules: its stages.
    """

    known: KnownTeacher
    places: TeacherPlaces
    modules: tuple[StageModule, ...]

    @classmethod
    def of(cls, known: KnownTeacher, places: TeacherPlaces) -> CutTeacher:
        """Cut a teacher."""
        check_as_is(known.captured, places.boundaries)
        return cls(known, places, cut(known.captured, places.boundaries))

    @property
    def name(self) -> str:
        """The teacher's name."""
        return self.known.name

    @property
    def form(self) -> NetOutput:
        """The form of its output."""
        return NetOutput.of(self.known.output, self.name)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The first layer of each stage, behind the teacher's name."""
        layers = self.known.captured.layers
        begins = (0, *self.places.boundaries)
        return tuple(f"{self.name}.{layers[begin].name}" for begin in begins)

    @property
    def state_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of each stage's state that a checkpoint has; none if frozen."""
        if not self.known.teacher.moves:
            return ((),) * len(self.modules)
        return tuple(
            tuple(f"{self.name}.{name}" for name in saved_tensors(module))
            for module in self.modules
        )

    @property
    def setup(self) -> NetSetup:
        """Return what workers set it up from."""
        teacher, model = self.known.teacher, self.known.captured.model
        return NetSetup(
            self.name,
            self.modules,
            [name for name, _ in model.named_parameters()],
            loss=None,
            settings=None,
            follows=teacher.update,
            training=teacher.is_training,
            seed_name=self.name,
            output=self.form,
            saved_prefix=f"{self.name}." if teacher.moves else None,
        )

    def stages(self, first_of_student: int) -> Iterator[Stage]:
        """Yield its stages in the program.

        Args:
            first_of_student: the number of the student's first stage in the program.
        """
        for i, device in enumerate(self.places.devices):
            follows = self.places.follows[i : i + 1]  # none of a frozen teacher's
            yield Stage(
                self.name,
                device,
                trainable=False,
                delay=self.known.teacher.delay or 0,
                follows=tuple(first_of_student + stage for stage in follows),
            )


def on_devices(boundaries: Sequence[int], num_layers: int) -> TeacherPlaces:
    """Return places of stages on devices 0, 1, ..., some of which have no layers.

    Args:
        boundaries: the layers at which the share of devices 1, 2, ... begins; of two
            equal ones, the first device has none.
        num_layers: the teacher's layers.
    """
    begins = [
        (device, begin)
        for device, (begin, end) in enumerate(pairwise((0, *boundaries, num_layers)))
        if begin < end
    ]
    return TeacherPlaces(
        tuple(begin for _, begin in begins[1:]), tuple(device for device, _ in begins)
    )


def beside_student(
    known: KnownTeacher, student: Sequence[StageModule], devices: Sequence[int]
) -> TeacherPlaces:
    """Return the places of a teacher that is cut where the student is.

    Args:
        known: the teacher.
        student: the student's stages.
        devices: their devices.

    Raises:
        ModelError: a layer of the teacher has parameters of several of these stages.
    """
    held = [{name for name, _ in module.named_parameters()} for module in student]
    at, stages = 0, []
    for layer in known.captured.layers:
        own = set(layer.parameters)
        found = [k for k in range(at, len(held)) if own <= held[k]]
        if not found:
            raise ModelError(
                f"the teacher {known.name!r} follows the student, so that each of its "
                f"layers must be in one stage with the same layer of the student, but "
                f"{layer.name} (with {', '.join(layer.parameters)}) is in none of the "
                f"stages {at} to {len(held) - 1}: cut the student at modules that both "
                "nets have, with cut="
            )
        at = found[0]
        stages.append(at)
    begins = [i for i, stage in enumerate(stages) if not i or stage != stages[i - 1]]
    follows = tuple(stages[begin] for begin in begins)
    return TeacherPlaces(
        tuple(begins[1:]), tuple(devices[stage] for stage in follows), follows
    )


def check_followed(name: str, teacher: nn.Module, student: nn.Module) -> None:
    """Check that a student has all parameters of a teacher that follows it.

    Args:
        name: the teacher's name.
        teacher: the teacher.
        student: the student.

    Raises:
        ModelError: it lacks some, or they have another shape; names them.
    """
    held = dict(student.named_parameters(remove_duplicate=False))
    faults = []
    for parameter, x in teacher.named_parameters():
        if parameter not in held:
            faults.append(f"the student has no {parameter}")
        elif held[parameter].shape != x.shape:
            faults.append(
                f"{parameter} has shape {tuple(x.shape)} in the teacher and "
                f"{tuple(held[parameter].shape)} in the student"
            )
    if faults:
        more = ""
        if len(faults) > _NUM_SHOWN:
            more = f", and {len(faults) - _NUM_SHOWN} more"
        raise ModelError(
            f"the teacher {name!r} follows the student by the names of its parameters: "
            f"{'; '.join(faults[:_NUM_SHOWN])}{more}. Give both the same modules under "
            "the same names, such as a teacher that is a copy of the student; the "
            "student may have more, such as a predictor"
        )
