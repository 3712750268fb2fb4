"""What teachers a pipeline cannot use, and in which words it says so."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.run.tune.teachers.joint import LowMomentumWarning, warn_of_low_momentum
from tests.run.support.started import started
from tests.run.support.teacher_models import (
    Encoder,
    adamw,
    distil,
    make_batches,
    make_student,
    make_teacher,
)


def make(**more: Any) -> None:
    """Make a pipeline on one device, and close it."""
    settings: dict[str, Any] = {
        "optimizer": adamw,
        "example": make_batches(1)[0],
        "num_microbatches": 2,
        "teachers": {"teacher": hocket.Teacher(make_teacher("frozen"))},
    }
    loss = more.pop("loss", distil)
    student = more.pop("student", None) or make_student()
    hocket.Pipeline(student, loss, **(settings | more)).close()


def test_all_faults_of_a_teacher_are_named() -> None:
    """One error says what is wrong with each argument, and the way out."""
    with pytest.raises(hocket.ConfigError) as found:
        hocket.Teacher(
            nn.Linear(2, 2),
            delay=-1,
            mode="test",  # type: ignore[arg-type]
            look_ahead=-1,
            num_microbatches=0,
        )
    text = str(found.value)
    for words in (
        "delay is -1, which has no effect on a frozen teacher",
        "delay is -1: it must be 0 or more updates",
        "look_ahead is -1: it must be 0 or more batches",
        "mode is 'test': it may be 'eval' or 'train'",
        "num_microbatches is 0: it must be at least 1",
    ):
        assert words in text
    with pytest.raises(hocket.ConfigError, match="give the student's cut"):
        hocket.Teacher(nn.Linear(2, 2), update=hocket.Momentum(0.99), cut=["a"])
    with pytest.raises(hocket.ConfigError, match=r"update is 0\.99"):
        hocket.Teacher(nn.Linear(2, 2), update=0.99)  # type: ignore[arg-type]
    with pytest.raises(hocket.ConfigError, match=r"update=hocket\.Momentum\(0\.99\)"):
        hocket.Teacher(nn.Linear(2, 2), momentum=0.99)  # type: ignore[call-arg]
    with pytest.raises(hocket.ConfigError, match="look_ahead is 2 and delay is 1"):
        hocket.Teacher(
            nn.Linear(2, 2), update=hocket.Momentum(0.99), delay=1, look_ahead=2
        )
    copied = hocket.Momentum(0.99, buffers="copied")
    with pytest.raises(hocket.ConfigError, match='Take delay=0, or buffers="own"'):
        hocket.Teacher(nn.BatchNorm1d(2), update=copied, delay=1)


def test_nets_that_share_parameters_are_refused() -> None:
    """A momentum teacher that is the student itself would shrink all weights."""
    student = Encoder(4, predicts=False).double()
    update = hocket.Momentum(0.99)
    shared = hocket.Teacher(nn.Sequential(student.head))
    with pytest.raises(hocket.ConfigError, match="shares parameters with the student"):
        make(student=student, teachers={"teacher": shared})
    twice = hocket.Teacher(copy.deepcopy(student), update=update)
    with pytest.raises(hocket.ConfigError, match="shares parameters with teacher 'a'"):
        make(student=student, teachers={"a": twice, "b": twice})


def two_arguments(output: Tensor, targets: Tensor) -> Tensor:
    """Read no teacher."""
    return F.cross_entropy(output, targets)


FROZEN = hocket.Teacher(nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"teachers": {"model": FROZEN}}, "named 'model', as the student is"),
        ({"teachers": {"head": FROZEN}}, "head.weight could be a parameter of the st"),
        (
            {"teachers": {"teacher": nn.Linear(6, 6)}},
            "is a Linear: give hocket.Teacher",
        ),
        ({"loss": two_arguments}, r"loss\(output, targets, teachers\)"),
        ({"loss": nn.CrossEntropyLoss()}, "cannot be called with three arguments"),
        ({"schedule": "pipedream-2bw"}, "the steps of schedule pipedream-2bw overlap"),
        ({"schedule": "auto", "max_delay": 1}, "max_delay 1 has no effect with teach"),
        ({"teachers": {"my teacher": FROZEN}}, "use letters, digits, _ and -"),
        (
            {"teachers": {"teacher": hocket.Teacher(FROZEN.net, num_microbatches=3)}},
            "has 3 microbatches, and the student 2: take a multiple",
        ),
    ],
)
def test_settings_that_teachers_do_not_go_with(more: Any, words: str) -> None:
    """Each is refused before anything is measured, with the way out."""
    with pytest.raises(hocket.ConfigError, match=words):
        make(**more)


def test_a_teacher_that_follows_must_have_the_students_parameters() -> None:
    """What the student lacks is named; it may have more, such as a predictor."""
    update = hocket.Momentum(0.99)
    deeper = hocket.Teacher(Encoder(5, predicts=False).double(), update=update)
    with pytest.raises(hocket.ModelError, match=r"the student has no blocks\.4\.0\.w"):
        make(teachers={"teacher": deeper})
    wider = Encoder(4, predicts=False).double()
    wider.head = nn.Linear(6, 7).double()
    with pytest.raises(
        hocket.ModelError,
        match=r"head\.weight has shape \(7, 6\) in the teacher and \(6",
    ):
        make(teachers={"teacher": hocket.Teacher(wider, update=update)})


def subtract(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Compare outputs of one shape."""
    return (output - teachers["teacher"].own).square().mean()


def test_outputs_that_do_not_match() -> None:
    """The error has the shapes of both."""
    teacher = copy.deepcopy(make_teacher("frozen"))
    teacher.head = nn.Linear(6, 5).double()
    with pytest.raises(
        hocket.ModelError, match=r"output: \(7, 6\) float64; .*\.own: \(7, 5\)"
    ):
        make(teachers={"teacher": hocket.Teacher(teacher)}, loss=subtract)


def read_all(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Read outputs of other samples."""
    return (output - teachers["teacher"].all[: len(output)]).square().mean()


def test_outputs_of_other_samples_must_be_asked_for() -> None:
    """A usual flow has a microbatch's own samples alone."""
    with pytest.raises(hocket.ConfigError, match="whole_batch=True"):
        make(loss=read_all)


def pair_views(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Compare each row with that of the other view, half a batch away."""
    found = teachers["teacher"]
    assert len(found.all) == len(make_batches(1)[0][0])
    partner = (found.rows + len(found.all) // 2) % len(found.all)
    return (output - found.all[partner]).square().mean()


def test_a_whole_batch_is_whole_wherever_the_loss_is_called() -> None:
    """Also before the first step, where it is tried on examples; its parts are odd."""
    teacher = hocket.Teacher(make_teacher("frozen"), whole_batch=True)
    make(loss=pair_views, teachers={"teacher": teacher}, num_microbatches=2)


def test_a_low_momentum_with_a_delay_is_warned_of() -> None:
    """At 0.5 a forward is half the distance behind; at 0.99, or delay 0, it is not."""
    net = make_teacher("momentum")

    def teachers(m: float, delay: int) -> dict[str, hocket.Teacher]:
        return {"t": hocket.Teacher(net, update=hocket.Momentum(m), delay=delay)}

    with pytest.warns(LowMomentumWarning, match=r"50% .* is 1\.0 updates"):
        warn_of_low_momentum(teachers(0.5, 1))
    warn_of_low_momentum(teachers(0.5, 0))
    warn_of_low_momentum(teachers(0.99, 1))


def test_a_frozen_teacher_is_not_saved_and_keeps_its_flags() -> None:
    """It is in no state, and no training changes it."""
    teacher = make_teacher("frozen")
    before = copy.deepcopy(teacher.state_dict())
    with started(
        make_student(),
        distil,
        adamw,
        make_batches(1)[0],
        teachers={"teacher": hocket.Teacher(teacher)},
    ) as pipeline:
        for _ in pipeline.train(make_batches(3)):
            pass
        assert list(pipeline.state_dict()) == list(make_student().state_dict())
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])
