"""Students with teachers: models, losses, and the plain loop that trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.run.data.batch import split_batch
from hocket.run.data.step_batch import grouped
from tests.run.support.plain_loop import num_parts_of
from tests.run.support.plainly import classified

WIDTH: Final = 6
NUM_CLASSES: Final = WIDTH
NUM_STEPS: Final = 7
SIZES: Final = (14, 14, 14, 14, 14, 14, 9)  # samples of each batch


class Encoder(nn.Module):
    """Blocks with batch norms; a predictor at its end, or none."""

    def __init__(
        self, num_blocks: int, *, predicts: bool, is_tied: bool = False
    ) -> None:
        super().__init__()
        # Without biases, whose gradients would be rounding errors.
        linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(x, nn.BatchNorm1d(WIDTH), nn.Tanh()) for x in linears)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.predictor = nn.Linear(NUM_CLASSES, NUM_CLASSES) if predicts else None
        if is_tied:
            self.head.weight = linears[0].weight

    def forward(self, x_BW: Tensor) -> Tensor:
        """From (batch, width) to (batch, classes)."""
        x_BC = self.head(self.blocks(x_BW))
        return x_BC if self.predictor is None else self.predictor(x_BC)


def make_student(num_frozen: int = 0, *, is_tied: bool = False) -> Encoder:
    """Make the student, which has a predictor.

    Its first blocks may be frozen; its first and last weights may be tied.
    """
    torch.manual_seed(3)
    student = Encoder(4, predicts=True, is_tied=is_tied).double()
    student.blocks[:num_frozen].requires_grad_(False)
    return student


def make_teacher(kind: str, *, is_tied: bool = False) -> Encoder:
    """Make a teacher: a deeper one that is frozen, or the student's encoder."""
    torch.manual_seed(5)
    if kind == "frozen":
        return Encoder(6, predicts=False).double()
    teacher = Encoder(4, predicts=False, is_tied=is_tied).double()
    own = make_student(is_tied=is_tied).state_dict()
    teacher.load_state_dict(own, strict=False)
    teacher.head.weight.data += 0.1
    return teacher.requires_grad_(False)


def make_batches(num_steps: int = NUM_STEPS) -> list[tuple[Tensor, Tensor]]:
    """Make batches of vectors and classes; the last one is smaller."""
    return classified(SIZES[:num_steps], WIDTH, NUM_CLASSES, seed=11)


def distil(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Any:
    """Return the classes' loss and the distance to each teacher, per sample."""
    found = {"classes": F.cross_entropy(output, targets)}
    for name, teacher in teachers.items():
        log_p, q = F.log_softmax(output / 2, 1), F.softmax(teacher.own / 2, 1)
        found[name] = F.kl_div(log_p, q, reduction="batchmean")
    return found


def contrast(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Compare each sample with the teachers' outputs of all samples."""
    total = F.cross_entropy(output, targets)
    for teacher in teachers.values():
        logits = output @ teacher.own.tanh().T
        total = total + F.cross_entropy(logits, torch.arange(len(output)))
    return total


def contrast_with_all(
    output: Tensor, targets: Tensor, teachers: Mapping[str, Any]
) -> Tensor:
    """Do the same in a microbatch, with a teacher that gives the whole batch."""
    total = F.cross_entropy(output, targets)
    for teacher in teachers.values():
        logits = output @ teacher.all.tanh().T
        total = total + F.cross_entropy(logits, teacher.rows)
    return total


def masked(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Return the mean over samples whose class is not 0."""
    kept = targets != 0
    log_p, q = F.log_softmax(output, 1), F.softmax(teachers["teacher"].own, 1)
    each = F.kl_div(log_p, q, reduction="none").sum(1)
    return each[kept].sum() / kept.sum()


def count_kept(targets: Tensor) -> Tensor:
    """Return what `masked` divides by."""
    return (targets != 0).sum()


LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "distil": distil,
    "contrast": hocket.WholeBatch(contrast),
    "per-microbatch": hocket.PerMicrobatch(contrast),
    "contrast-with-all": contrast_with_all,
    "masked": hocket.TokenMean(masked, count_kept),
}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that is sensitive to small differences."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def rising(step: int) -> float:
    """Return a momentum that changes from step to step."""
    return 0.9 + 0.01 * step


def update_of(kind: str) -> hocket.Momentum | hocket.CopyEvery | None:
    """Return how a teacher of a kind follows the student."""
    if kind == "frozen":
        return None
    return hocket.CopyEvery(3) if kind == "copies" else hocket.Momentum(rising)


def case_of(kind: str, schedule: str, **more: Any) -> dict[str, Any]:
    """Return a case with one teacher.

    Args:
        kind: "frozen", "momentum" or "copies".
        schedule: the student's.
        more: `delay`, `mode`, `num_parts` (microbatches) and so on of the teacher; and
            what the case has else.
    """
    names = ("delay", "look_ahead", "mode", "whole_batch", "cut")
    facts = {"kind": kind, **{key: more.pop(key) for key in names if key in more}}
    if "num_parts" in more:
        facts["num_microbatches"] = more.pop("num_parts")
    return {"schedule": schedule, "teachers": {"teacher": facts}, **more}


def weighted(output: Tensor, targets: Any, teachers: Mapping[str, Any]) -> Tensor:
    """Return the mean of what the samples cost, each with a weight of its own."""
    return (each_cost(output, targets[0], teachers["teacher"].own) * targets[1]).mean()


def each_cost(output: Tensor, classes: Tensor, read: Tensor) -> Tensor:
    """Return what each sample costs."""
    near = (output - read).square().sum(1)
    return F.cross_entropy(output, classes, reduction="none") + near


def term_of(x: Tensor, y: Tensor, sample: int) -> dict[str, Tensor]:
    """Return the gradient of one sample's term, by the student's names."""
    student, teacher = make_student().train(), make_teacher("frozen").eval()
    for rows in torch.arange(len(x)).tensor_split(4):
        if sample in rows:
            cost = each_cost(student(x[rows]), y[rows], teacher(x[rows]).detach())
            (cost[rows == sample].sum() / len(x)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in student.named_parameters()
    }


@dataclass(frozen=True)
class Outputs:
    """A teacher's outputs, as the plain loop gives them to a loss."""

    own: Any
    all: Any
    rows: Any


@dataclass
class PlainTeacher:
    """A teacher beside the plain loop, with its versions."""

    facts: Mapping[str, Any]
    net: nn.Module
    versions: list[dict[str, Tensor]]

    @classmethod
    def of(cls, facts: Mapping[str, Any], *, is_tied: bool) -> PlainTeacher:
        """Make it."""
        net = make_teacher(facts["kind"], is_tied=is_tied)
        usual = "eval" if facts["kind"] == "frozen" else "train"
        net.train((facts.get("mode") or usual) == "train")
        return cls(facts, net, [_weights(net)])

    def read_by(self, step: int) -> None:
        """Put the weights in place that the forwards of a batch read."""
        back = max(0, step - (self.facts.get("delay") or 0))
        self._put(self.versions[min(back, len(self.versions) - 1)])

    def follow(self, student: nn.Module, step: int) -> None:
        """Move after an update of the student."""
        update = update_of(self.facts["kind"])
        if update is None:
            return
        newest, m = self.versions[-1], update.at(step)
        named = dict(student.named_parameters())
        moved = {n: m * x + (1 - m) * named[n].detach() for n, x in newest.items()}
        self.versions.append(moved)
        self._put(moved)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.net.named_parameters():
            parameter.copy_(weights[name])


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in net.named_parameters()}


def plain_loop(
    case: Mapping[str, Any],
) -> tuple[dict[str, Tensor], list[dict[str, float]], dict[str, float]]:
    """Train in one process, one microbatch after the other.

    Returns:
        The weights and buffers, those of teachers that move under their names; the
        losses of each step; and those of an evaluation of the last two batches.
    """
    is_tied = case.get("is_tied", False)
    student = make_student(case.get("frozen_blocks", 0), is_tied=is_tied).train()
    teachers = {
        name: PlainTeacher.of(x, is_tied=is_tied)
        for name, x in case["teachers"].items()
    }
    optimizer = adamw([x for x in student.parameters() if x.requires_grad])
    history = []
    for step, batches in enumerate(grouped(make_batches(), case.get("accumulate", 1))):
        for teacher in teachers.values():
            teacher.read_by(step)
        history.append(_sum_of(case, student, teachers, batches))
        if "clip_norm" in case:
            nn.utils.clip_grad_norm_(student.parameters(), case["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for teacher in teachers.values():
            teacher.follow(student, step)
    state = dict(student.state_dict())
    for name, teacher in teachers.items():
        if teacher.facts["kind"] != "frozen":
            own = teacher.net.state_dict().items()
            state |= {f"{name}.{key}": x for key, x in own}
    return state, history, _evaluated(case, student, teachers)


def _sum_of(
    case: Mapping[str, Any],
    student: nn.Module,
    teachers: Mapping[str, PlainTeacher],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, float]:
    """Add up the gradients and losses of several batches, weighted by samples."""
    sums = dict[str, float]()
    total = sum(len(x) for x, _ in batches)
    for batch in batches:
        share = len(batch[0]) / total
        for name, value in _step(case, student, teachers, batch, share).items():
            sums[name] = sums.get(name, 0.0) + share * value
    return sums


def _step(
    case: Mapping[str, Any],
    student: nn.Module,
    teachers: Mapping[str, PlainTeacher],
    batch: tuple[Tensor, Tensor],
    share: float,
) -> dict[str, float]:
    loss, sums = LOSSES[case.get("loss", "distil")], dict[str, float]()
    m = num_parts_of({"num_microbatches": 4, **case})
    parts = split_batch(batch, m)
    with torch.no_grad():
        read = {
            name: [teacher.net(part.leaves[0]) for part in parts]
            for name, teacher in teachers.items()
        }
    if isinstance(loss, hocket.WholeBatch):
        outputs = torch.cat([student(part.leaves[0]) for part in parts])
        whole = {name: Outputs(torch.cat(x), None, None) for name, x in read.items()}
        named = _named(loss.loss(outputs, batch[1], whole))
        (named["loss"] * share).backward()
        return {key: x.item() for key, x in named.items()}
    counted = isinstance(loss, hocket.TokenMean)
    counts = [
        float(count_kept(part.targets)) if counted else part.num_samples
        for part in parts
    ]
    begin = 0
    for i, part in enumerate(parts):
        rows = torch.arange(begin, begin + part.num_samples)
        begin += part.num_samples
        if not counts[i]:
            student(part.leaves[0])  # batch norms see it
            continue
        own = {name: Outputs(x[i], torch.cat(x), rows) for name, x in read.items()}
        inner = getattr(loss, "loss", loss)
        named = _named(inner(student(part.leaves[0]), part.targets, own))
        weight = counts[i] / sum(counts)
        (named["loss"] * (weight * share)).backward()
        for key, value in named.items():
            sums[key] = sums.get(key, 0.0) + value.item() * weight
    return sums


def _evaluated(
    case: Mapping[str, Any], student: nn.Module, teachers: Mapping[str, PlainTeacher]
) -> dict[str, float]:
    """Return the losses of two batches with the newest weights, by microbatch."""
    student.eval()
    loss = LOSSES[case.get("loss", "distil")]
    inner = getattr(loss, "loss", loss)
    sums, total = dict[str, float](), 0.0
    m = num_parts_of({"num_microbatches": 4, **case})
    for x, y in make_batches()[-2:]:
        parts = 1 if isinstance(loss, hocket.WholeBatch) else m
        with torch.no_grad():
            read = {name: teacher.net.eval()(x) for name, teacher in teachers.items()}
            for rows in torch.arange(len(x)).tensor_split(parts):
                own = {name: Outputs(z[rows], z, rows) for name, z in read.items()}
                counted = isinstance(loss, hocket.TokenMean)
                weight = float(count_kept(y[rows])) if counted else len(rows)
                if not weight:
                    continue
                total += weight
                for key, value in _named(inner(student(x[rows]), y[rows], own)).items():
                    sums[key] = sums.get(key, 0.0) + value.item() * weight
    return {key: value / total for key, value in sums.items()}


def _named(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {"loss": value}
    return {"loss": sum(value.values()), **value}


def largest_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> float:
    """Return the largest difference of any tensor, relative to its largest entry."""
    assert list(found) == list(expected)
    worst = 0.0
    for name, value in expected.items():
        if value.is_floating_point():
            error = (found[name] - value).abs().max() / value.abs().max()
            worst = max(worst, float(error))
        else:
            assert torch.equal(found[name], value), name
    return worst
