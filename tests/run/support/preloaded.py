"""What the fork server has done when the first worker is forked from it.

A worker would import torch, torch's compiler (its optimizers ask for it), what
`torch.export` stands on, and hocket: seconds, in each worker of each test. Here it is
done once; what is measured in such workers is measured shortly, and models of one form
are exported once. The models that most jobs train are captured, for microbatches of the
sizes that they have.

Nothing here may start a thread: a forked process has only the one that forked.
"""

from __future__ import annotations

import gc
from functools import partial
from importlib import import_module
from typing import Final

import pytest

MODULES: Final = (
    "hocket.recipes.training.train",
    "hocket.run.cluster.launch",
    "safetensors.torch",
    "tests.run.support.transport_pair",
    "tests.run.support.small_models",
    "torch._dynamo",
    "torch.distributed.run",
)
READY: Final = (
    ("tied", 4),
    ("tied-dropout", 4),
    ("resnet", 4),
    ("resnet", 5),
    ("perceptron", 4),
    ("dropout", 4),
)


def _prepare() -> None:
    for name in MODULES:
        import_module(name)
    from hocket.model.capture.capture import capture
    from hocket.run.data.batch import call_arguments
    from tests.run.support.captured_once import keep_ready
    from tests.run.support.exported_once import export_once
    from tests.run.support.failing_workers import make_batches
    from tests.run.support.failing_workers import make_model as make_failing_model
    from tests.run.support.freezing_workers import make_batches as freezing_batches
    from tests.run.support.freezing_workers import make_model as make_freezing_model
    from tests.run.support.short_measurements import measure_shortly
    from tests.run.support.small_models import batches, make_model
    from tests.run.support.teacher_models import make_batches as teacher_batches
    from tests.run.support.teacher_models import make_student, make_teacher

    export_once(pytest.MonkeyPatch())
    for name, num_samples in READY:
        [(inputs, _)] = batches(name, 1, num_samples, num_samples)
        keep_ready(name, partial(make_model, name), *call_arguments(inputs))
    for model, (inputs, _) in (
        (make_freezing_model(), freezing_batches()[0]),
        (make_student(), teacher_batches()[0]),
        *((make_teacher(kind), teacher_batches()[0]) for kind in ("frozen", "moves")),
    ):
        capture(model, (inputs,))  # exported once, for all who are forked
    # Of this model torch then knows all operators, with fake tensors of these shapes.
    [(inputs, _)] = make_batches(1, size=4)
    capture(make_failing_model(), (inputs,))
    measure_shortly(pytest.MonkeyPatch())
    gc.freeze()  # the collector skips what is there now


_prepare()
