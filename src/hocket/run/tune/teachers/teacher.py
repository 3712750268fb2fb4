"""One teacher of a pipeline, as the user gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal, TypeGuard

from torch import nn

from hocket.errors import ConfigError
from hocket.run.data.loss import LossFunction
from hocket.run.stage.net_output import takes_teachers
from hocket.run.weights.momentum import CopyEvery, FollowerUpdate, Momentum
from hocket.signatures import names_its_arguments

_STUDENT: Final = "model"  # the student's net in programs


@names_its_arguments(momentum="give update=hocket.Momentum(0.99)")
@dataclass(frozen=True, slots=True)
class Teacher:
    """A net without backwards, whose outputs the student's loss reads.

    The pipeline does the teacher's forwards where the student's devices would wait. The
    results are those of a plain loop: batch `k` (from 0) reads a teacher that moves
    after `max(0, k - delay)` updates.

    Args:
        net: the teacher; it is called with the same inputs as the student. Each worker
            keeps its stages of it, as of the student.
        update: how it follows the student after each step, by parameter name: a
            `hocket.Momentum` or a `hocket.CopyEvery`; None for a frozen teacher.
        delay: by how many updates a teacher that moves may be stale; 0 when not given.
            With 1 or more its forwards run so many batches ahead.
        look_ahead: by how many batches its forwards are ahead of the student, so that
            they can fill more waits; each keeps the outputs of one batch more. When not
            given, 1 for a frozen teacher, and `delay` for one that moves: with less, it
            keeps old versions of its weights.
        mode: "eval" or "train": in which its modules run (dropout, BatchNorm); the net
            is put into it. When not given, "eval" for a frozen teacher, and for one
            that moves the mode that it has, with those of its modules. A frozen teacher
            is not saved, nor are the statistics that "train" changes in it.
        num_microbatches: the parts of its batch in each replica; the student's number
            when not given.
        whole_batch: whether the loss of each microbatch reads the teacher's outputs of
            the whole batch (`.all` and `.rows`), and not only of its own samples.
        cut: the modules at which stages 1, 2, ... of a frozen teacher begin, one stage
            per device; balanced together with the student when not given. A teacher
            that follows the student is cut where that is.

    Raises:
        ConfigError: an argument is not valid, or has no effect; names all such.
    """

    net: nn.Module = field(repr=False, compare=False)
    _: KW_ONLY
    update: FollowerUpdate | None = None
    delay: int | None = None
    look_ahead: int | None = None
    mode: Literal["eval", "train"] | None = None
    num_microbatches: int | None = None
    whole_batch: bool = False
    cut: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if faults := "; ".join(self._faults()):
            raise ConfigError(f"Teacher: {faults}")

    def _faults(self) -> Iterator[str]:
        if not isinstance(self.net, nn.Module):
            yield f"net is a {type(self.net).__name__}: give an nn.Module"
        if self.update is not None and not isinstance(
            self.update, Momentum | CopyEvery
        ):
            yield (
                f"update is {self.update!r:.60}: give hocket.Momentum(0.996) or "
                "hocket.CopyEvery(100), or None for a frozen teacher"
            )
        else:
            yield from self._delay_faults()
            yield from self._look_ahead_faults()
        if self.mode not in (None, "eval", "train"):
            yield f"mode is {self.mode!r}: it may be 'eval' or 'train'"
        if self.num_microbatches is not None and self.num_microbatches < 1:
            yield f"num_microbatches is {self.num_microbatches}: it must be at least 1"
        if self.cut is not None and self.update is not None:
            yield (
                "cut has no effect on a teacher that follows the student: it is cut "
                "where the student is, so give the student's cut"
            )

    def _delay_faults(self) -> Iterator[str]:
        if self.delay is not None and self.update is None:
            yield (
                f"delay is {self.delay}, which has no effect on a frozen teacher: "
                "its weights are always the same. Leave it out, or give update="
            )
        if self.delay is not None and self.delay < 0:
            yield f"delay is {self.delay}: it must be 0 or more updates"
        buffers = "own" if self.update is None else self.update.buffers
        if self.delay and buffers != "own":
            yield (
                f"delay is {self.delay} and update has buffers={buffers!r}: old "
                'versions of buffers are not kept. Take delay=0, or buffers="own"'
            )

    def _look_ahead_faults(self) -> Iterator[str]:
        if self.look_ahead is None:
            return
        if self.look_ahead < 0:
            yield f"look_ahead is {self.look_ahead}: it must be 0 or more batches"
        most = self.delay or 0
        if self.moves and self.look_ahead > most:
            yield (
                f"look_ahead is {self.look_ahead} and delay is {most}: forwards so far "
                "ahead would read weights that are not there yet. Use at most the "
                f"delay, or delay={self.look_ahead}"
            )

    @property
    def moves(self) -> bool:
        """Whether its weights change."""
        return self.update is not None

    @property
    def text(self) -> str:
        """Text of the settings, which all workers must have alike."""
        update = "none" if self.update is None else self.update.text
        return (
            f"update {update}, delay {self.delay}, look_ahead {self.look_ahead}, "
            f"training {self.is_training}, num_microbatches "
            f"{self.num_microbatches}, whole_batch {self.whole_batch}, cut {self.cut}"
        )

    @property
    def num_ahead(self) -> int:
        """How many batches its forwards are ahead of the student."""
        if self.look_ahead is not None:
            return self.look_ahead
        return (self.delay or 0) if self.moves else 1

    @property
    def is_training(self) -> bool:
        """Whether its modules run in training mode."""
        is_own = self.moves and self.net.training
        return is_own if self.mode is None else self.mode == "train"


def _has_net(teacher: object) -> TypeGuard[Teacher]:
    return isinstance(teacher, Teacher) and isinstance(teacher.net, nn.Module)


def teacher_faults(
    teachers: Mapping[str, object], model: nn.Module, loss: LossFunction
) -> Iterator[str]:
    """Yield a sentence for each fault of a pipeline's teachers.

    Args:
        teachers: by name.
        model: the student.
        loss: the student's loss.
    """
    children = {name for name, _ in model.named_children()}
    seen = {id(x): "the student" for x in model.parameters()}
    for name, teacher in teachers.items():
        own = teacher.net.parameters() if _has_net(teacher) else ()
        if other := next((seen[id(x)] for x in own if id(x) in seen), ""):
            yield (
                f"teacher {name!r} shares parameters with {other}, so that what moves "
                "one moves both: give a copy, such as copy.deepcopy(model)"
            )
        if _has_net(teacher) and teacher.moves:
            seen |= {id(x): f"teacher {name!r}" for x in teacher.net.parameters()}
        if not isinstance(teacher, Teacher):
            yield (
                f"teachers[{name!r}] is a {type(teacher).__name__}: give "
                "hocket.Teacher(net)"
            )
        if name == _STUDENT:
            yield f"a teacher is named {name!r}, as the student is: give another name"
        elif name in children or "." in name:
            yield (
                f"a teacher is named {name!r}, so that {name}.weight could be a "
                "parameter of the student as well: give another name"
            )
    if teachers and not takes_teachers(loss):
        yield (
            "the loss cannot be called with three arguments: with teachers it is "
            "loss(output, targets, teachers), where teachers[name].own are a teacher's "
            "outputs of these samples"
        )
