"""Sharded weights: what the plain loop would do is done, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.run.support.forked import answers_of

EQUAL = (
    "float32",
    "bfloat16",
    "second pipeline of copies",
    "norms",
    "by identity",
    "Muon",
    "whole batch",
)
NEAR = {"float32": 1e-6, "bfloat16": 1e-2, "Muon": 5e-3}  # which computes in bfloat16
REFUSED = {
    "filled": "of shape (5, 6) was written while it was sharded",
    "filled data": "of shape (5, 6) was written while it was sharded",
    "one element": "of shape (1,) was written while it was sharded",
    "max_norm": "of shape (9, 5) was changed in place by a forward",
    "channels_last": "0.weight is not contiguous",
    "second pipeline": "the model's 0.weight has no values here",
    "compiled": "the model's 0.weight has no values here",
    "another optimizer": "SGD.step() finds no gradient: 0.weight is in a pipeline",
    "freeze": "num_shards 2 does not go together with freeze",
    "numbers": "the optimizer trains sharded weights to others",
    "draws": "the optimizer draws random numbers",
    "data": "the optimizer trains sharded weights to others",
    "by identity, with a state": "chooses parameters by identity or by value",
    "Adafactor": "cannot step sharded weights",
    "DTensors": "the model's 0.weight is sharded over",
    "experts": "the model's 0.weight is sharded over",
    "tp twice": "over all of the job, and one for all weights",
    "tp in a teacher": "is a DTensor, as `parallelize_module`, a tp_plan",
    "tp in emulate": "is a DTensor, as `parallelize_module`, a tp_plan",
    "tp in waves": "is a DTensor, as `parallelize_module`, a tp_plan",
    "tp in compile_step": "is a DTensor, as `parallelize_module`, a tp_plan",
    "tp and shards": "does not go together with num_shards: leave it out, or give",
    "tp and replicas": "1 x 2 (tp) workers cannot form 2 equal replicas",
    "tp and old weights": "a model with DTensors has no older versions of weights",
    "tp and auto": "schedule 'auto', nor with precision 'float16'",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all cases, on both workers."""
    folder = tmp_path_factory.mktemp("law")
    return answers_of("sharded_law_workers:run", folder=folder, whole_s=200.0)


@pytest.mark.timeout(240)
def test_equals_the_plain_loop(answers: list[dict[str, Any]]) -> None:
    """To rounding: the weights, or the loss of the second step."""
    for found in answers:
        first = found["second step"]
        for name in EQUAL:
            far = found[name] - (first if name.startswith("second") else 0.0)
            assert abs(far) <= NEAR.get(name, 1e-10), (name, found[name])


def test_refuses_by_name(answers: list[dict[str, Any]]) -> None:
    """Both workers raise it: none waits for another one."""
    for found in answers:
        for name, text in REFUSED.items():
            assert text in str(found[name]), (name, found[name])
            kinds = "ConfigError", "ModelError", "ShapeError"
            assert found[name].startswith(kinds), name


def test_torch_refuses_writes(answers: list[dict[str, Any]]) -> None:
    """To what takes no memory, in the line of the loop that writes."""
    assert all("a single memory location" in found["clamped"] for found in answers)


def test_names_what_one_worker_changes(answers: list[dict[str, Any]]) -> None:
    """A weight that it freezes: the reductions of all stay alike until then."""
    for found in answers:
        assert found["frozen on one"].startswith(
            "SchemaError: at step 1, what the loop"
        )
