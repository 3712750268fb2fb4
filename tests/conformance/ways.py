"""The ways to run a case by hocket, and what comes beside the plain loop."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.parameter import is_lazy

import hocket
from hocket.errors import HocketError
from hocket.run.cluster.world import World
from tests.conformance.plain import Plain, Trained, apart, state_of, total_of
from tests.conformance.script import Case, Script, own_form

NEAR_ZERO: Final = 1e-3  # smaller tensors are compared as if they were so large

_SCHEDULES: Final = {"wpipe": "wpipe", "2bw": "pipedream-2bw"}
_SIDE_BY_SIDE: Final[dict[str, Any]] = {
    "shards-2": {"num_shards": 2},
    "replicas-2": {"num_replicas": 2},
}
_DELAYS: Final[dict[str, Any]] = {"wpipe": "front", "2bw": "all"}


@dataclass
class Outcome:
    """What a way to run a case came to, on one worker.

    Args:
        error: the kind and the message of what was raised.
        is_ours: whether that is an error of hocket's.
        differences: the largest relative ones, of each thing that is compared.
        seen: what the script's functions noted; and in the plain loop.
        expected: the same, in the plain loop.
        warned: hocket's warnings.
    """

    error: str
    is_ours: bool
    differences: dict[str, float]
    seen: dict[str, list[Any]]
    expected: dict[str, list[Any]]
    warned: list[str]

    @property
    def worst(self) -> float:
        """The largest difference of any thing; what is seen counts as equal or not."""
        noted = float("inf") if self.seen != self.expected else 0.0
        return max([*self.differences.values(), noted], default=0.0)

    def __str__(self) -> str:
        """Say what came, in a line."""
        if self.error:
            return self.error
        far = [f"{name} {x:.1e}" for name, x in self.differences.items() if x]
        seen = f"; seen {self.seen}, not {self.expected}"
        return ", ".join(far) + (seen if self.seen != self.expected else "")


def run(case: Case, way: str, world: World | None = None) -> Outcome:
    """Run a case in one way, and the plain loop.

    Args:
        case: the situation.
        way: of `script.WAYS`.
        world: the job of two workers, for ways that need one.
    """
    module._global_forward_hooks.clear()  # of a case that was refused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, plain_error = _plain(case, way).run(), ""
        except Exception as raised:
            expected, plain_error = None, f"{type(raised).__name__}: {raised}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, is_last = _run(case, way, world)
            error, is_ours = "", False
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            is_ours = isinstance(raised, HocketError)
    warned = [
        f"{x.category.__name__}: {x.message}"
        for x in caught
        if x.category.__module__.startswith("hocket")
    ]
    if error:
        return Outcome(error, is_ours, {}, {}, {}, warned)
    if expected is None:
        return Outcome("", False, {plain_error: float("inf")}, {}, {}, warned)
    differences = dict(_differences(found, expected, is_last=is_last))
    return Outcome("", False, differences, found.seen, expected.seen, warned)


def _scripts(case: Case, way: str) -> tuple[Script, nn.Module, Script | None]:
    """A script, its net in the form that the way trains, and one with a teacher."""
    script = case.make()
    net = script.net if way.startswith("seq") else own_form(script.net)
    if way != "teacher":
        return script, net, None
    teacher = case.make()
    teacher.net = own_form(teacher.net).eval()
    with torch.no_grad():
        for p in teacher.net.parameters():
            if not is_lazy(p):
                p.mul_(0.8)
    return script, net, teacher


def _plain(case: Case, way: str) -> Plain:
    script, net, teacher = _scripts(case, way)
    return Plain(
        script,
        net,
        num_parts=_num_parts(script, way),
        teacher=teacher,
        delays=_DELAYS.get(way, "none"),
        freezes=way == "freeze",
    )


def _num_parts(script: Script, way: str) -> int:
    """The microbatches of the plain loop: those of all pipelines together."""
    if way == "compile":
        return 1
    return script.num_microbatches * (2 if way in _SIDE_BY_SIDE else 1)


def _run(case: Case, way: str, world: World | None) -> tuple[Trained, bool]:
    script, net, teacher = _scripts(case, way)
    if way == "compile":
        return _compiled(script, net), True
    options: dict[str, Any] = {"schedule": "1f1b", "world": world}
    options |= _SIDE_BY_SIDE.get(way, {})
    if world is not None and script.cut and way not in _SIDE_BY_SIDE:
        options["cut"] = [script.cut]
    if way in _DELAYS:
        options |= {"schedule": _SCHEDULES[way]}
    if way == "wpipe":
        options |= {"cut": [script.cut]}
    if way == "freeze":
        policy = hocket.freeze.Listed({1: 1}, every_steps=2, layers=script.layers)
        options |= {"freeze": policy, "shapes": {}}
    if teacher is not None:
        taught = hocket.Teacher(teacher.net, look_ahead=0)
        options["teachers"] = {"teacher": taught}
    is_last = world is None or world.rank == world.world_size - 1
    return _pipelined(script, net, teacher, options), is_last


def _with_teacher(script: Script) -> Any:
    """The loss of a script with a term for its teacher; declared as its own is."""

    def loss(output: Any, targets: Any, teachers: Any) -> Tensor:
        found = total_of(script.loss(output, targets))
        return found + apart(output, teachers["teacher"].own)

    declared = isinstance(script.loss, hocket.PerMicrobatch)
    return hocket.PerMicrobatch(loss) if declared else loss


def _pipelined(
    script: Script, net: nn.Module, teacher: Script | None, options: dict[str, Any]
) -> Trained:
    if script.scheduler is not None:
        options["scheduler"] = script.scheduler
    if script.clip_norm is not None:
        options["clip_norm"] = script.clip_norm
    with (
        tempfile.TemporaryDirectory() as folder,
        hocket.Pipeline(
            net,
            script.loss if teacher is None else _with_teacher(script),
            optimizer=script.optimizer,
            example=script.batches[0],
            num_microbatches=script.num_microbatches,
            run_dir=folder,
            **{**options, **script.options},
        ) as pipeline,
    ):
        for found in script.seen.values():
            found.clear()
        losses = []
        for step, batch in enumerate(script.batches):
            script.before_step(step, net)
            if teacher is not None and script.teacher_alike:
                teacher.before_step(step, teacher.net)
            losses.append(pipeline.step(batch).loss)
            script.after_step(step, net)
            if teacher is not None and script.teacher_alike:
                teacher.after_step(step, teacher.net)
        seen = {name: [*found] for name, found in script.seen.items()}
        state, loss_state = pipeline.state_dict(), state_of(script.own_loss)
        if options["world"] is None and script.own_alike:
            own = {f"(own) {name}": x for name, x in state_of(net).items()}
            state |= own
        evaluated = _evaluated(pipeline, script) if script.evaluates else None
    return Trained(losses, state, loss_state, evaluated, seen)


def _compiled(script: Script, net: nn.Module) -> Trained:
    with hocket.compile_step(
        net, script.loss, script.optimizer, example=script.batches[0], num_lanes=1
    ) as step:
        scheduler = script.scheduler and script.scheduler(step.optimizer)
        for found in script.seen.values():
            found.clear()
        losses = []
        for number, batch in enumerate(script.batches):
            script.before_step(number, net)
            losses.append(step(batch).loss)
            if scheduler is not None:
                scheduler.step()
            script.after_step(number, net)
        step.synchronize()
        if hasattr(step.optimizer, "eval"):
            step.optimizer.eval()
    seen = {name: [*found] for name, found in script.seen.items()}
    return Trained(losses, state_of(net), state_of(script.own_loss), None, seen)


def _evaluated(pipeline: hocket.Pipeline, script: Script) -> tuple[float, float]:
    metric = script.metric
    if metric is None:
        return pipeline.evaluate(script.batches[:1]).loss, 0.0
    found = pipeline.evaluate(
        script.batches[:1], lambda output, targets: {"it": metric(output, targets)}
    )
    return found.loss, found.metrics["it"]


def _differences(
    found: Trained, expected: Trained, *, is_last: bool
) -> Iterator[tuple[str, float]]:
    pairs = zip(found.losses, expected.losses, strict=True)
    yield "losses", max(_apart(torch.tensor(a), torch.tensor(b)) for a, b in pairs)
    if found.evaluated is not None and expected.evaluated is not None:
        both = torch.tensor(found.evaluated), torch.tensor(expected.evaluated)
        yield "evaluated", _apart(*both)
    yield "state", _states_apart(found.state, expected.state)
    own = {n[6:]: x for n, x in found.state.items() if n.startswith("(own) ")}
    if own:
        yield "own modules", _states_apart(own, expected.state)
    if is_last and expected.loss_state:
        yield "the loss's", _states_apart(found.loss_state, expected.loss_state)


def _states_apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    missing = expected.keys() - found.keys()
    if missing:
        return float("inf")
    return max((_apart(found[n], x) for n, x in expected.items()), default=0.0)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(found, expected):
        return 0.0
    number = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(number), expected.to(number)
    far = float((a - b).abs().max() / b.abs().max().clamp(min=NEAR_ZERO))
    return far if far == far else float("inf")
