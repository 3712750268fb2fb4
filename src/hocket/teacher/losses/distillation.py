"""Knowledge distillation: cross-entropy to the targets and to a teacher's soft targets.

Sources: Hinton et al., arXiv:1503.02531, section 2; the sum with two weights is that of
TSPipe's benchmark (CE + weight * T^2 * KL, with T = 4 and weight 0.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.errors import ConfigError, ModelError


def require_positive(owner: str, **numbers: float) -> None:
    """Refuse numbers that are not positive.

    Args:
        owner: the name of the loss, for the error.
        numbers: the numbers by the names of their arguments.

    Raises:
        ConfigError: one of them is 0, negative or not a number.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{owner}({name}={number}): {name} must be above 0")


def require_weights(owner: str, **weights: float) -> None:
    """Refuse negative weights, and weights that are all 0.

    Raises:
        ConfigError: a weight is negative, or none is above 0.
    """
    given = ", ".join(f"{name}={weight}" for name, weight in weights.items())
    if not all(weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(
            f"{owner}({given}): weights must be 0 or more, and one of them above 0"
        )


def teacher_of(teachers: Mapping[str, Any], name: str, owner: str) -> Any:
    """Return the outputs of the teacher that a loss reads.

    Raises:
        ConfigError: there is no teacher of this name.
    """
    if name not in teachers:
        raise ConfigError(
            f"{owner} reads the outputs of teacher {name!r}, and the teachers are "
            f"{', '.join(map(repr, teachers)) or 'none'}: give "
            f"{owner}(teacher=...) the name that teachers={{...}} has"
        )
    return teachers[name]


def widened(tensor: Tensor) -> Tensor:
    """Convert half-precision numbers to float32; return others as they are."""
    return tensor if tensor.dtype.itemsize >= torch.float32.itemsize else tensor.float()


def require_tensor(value: Any, whose: str, way_out: str) -> Tensor:
    """Return what must be one tensor.

    Args:
        value: the value.
        whose: whose output it is, for the error.
        way_out: what to do where it is none.

    Raises:
        ModelError: it is no tensor.
    """
    if not isinstance(value, Tensor):
        raise ModelError(f"{whose} is a {type(value).__name__}: {way_out}")
    return value


def require_same_shape(
    student: Tensor, teacher: Tensor, name: str, what: str, way_out: str
) -> None:
    """Refuse outputs of student and teacher that differ in shape.

    Args:
        student: the student's output.
        teacher: the teacher's output of the same samples.
        name: the teacher's name.
        what: what both are, such as "logits".
        way_out: how to make them equal.

    Raises:
        ModelError: they differ; names both shapes.
    """
    if student.shape != teacher.shape:
        raise ModelError(
            f"the student's {what} are {tuple(student.shape)}, those of teacher "
            f"{name!r} are {tuple(teacher.shape)}: {way_out}"
        )


def require_labels(labels: Any, logits: Tensor) -> Tensor:
    """Return targets that hold one class for each row of logits.

    Raises:
        ModelError: they are no tensor, or have another shape.
    """
    wanted = tuple(logits.shape[:-1])
    if not isinstance(labels, Tensor) or labels.shape != wanted:
        is_tensor = isinstance(labels, Tensor)
        found = tuple(labels.shape) if is_tensor else f"a {type(labels).__name__}"
        raise ModelError(
            f"the student's logits are {tuple(logits.shape)}, and the targets {found}: "
            f"give one class for each, a tensor of shape {wanted}"
        )
    return labels


_SAME_CLASSES = "train both with the same classes, in the same order"


@dataclass(frozen=True, slots=True)
class Distillation:
    """Trains the student on targets and on a teacher's probabilities.

        loss = hard_weight * CE(student, targets)
             + weight * T^2 * KL(softmax(teacher / T) || softmax(student / T))

    Logits are (N, K), or (N, T, K) for T tokens; targets are their classes (N) or
    (N, T). Both terms are means over the targets other than `ignore_index`. Where their
    number differs by microbatch, `TokenMean` makes the mean over all of them exact:

        loss = hocket.Distillation(temperature=2.0)
        hocket.Pipeline(student, hocket.TokenMean(loss, count=loss.count), ...)

    Args:
        temperature: T; its square keeps the soft gradient's size when T changes.
        weight: the weight of the soft targets' loss.
        hard_weight: the weight of the cross-entropy to the targets. With 0, targets
            still say which tokens count.
        ignore_index: the target of samples or tokens that do not count.
        teacher: the teacher's name.

    Raises:
        ConfigError: the temperature or a weight is not valid.

    Source: Hinton et al., arXiv:1503.02531, section 2.
    """

    temperature: float = 4.0
    weight: float = 0.1
    hard_weight: float = 1.0
    ignore_index: int = -100
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        """Refuse numbers that make no loss."""
        require_positive("Distillation", temperature=self.temperature)
        require_weights(
            "Distillation", weight=self.weight, hard_weight=self.hard_weight
        )

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return the losses `loss`, which is trained, `soft` (with T^2) and `hard`.

        Args:
            output: the student's logits; or a mapping with `logits`.
            targets: the classes.
            teachers: the teachers' outputs by name; `.own` is read.

        Raises:
            ModelError: the shapes of logits and targets do not match.
            ConfigError: there is no teacher of this name.
        """
        found = teacher_of(teachers, self.teacher, "Distillation").own
        student = logits_of(output, "the student's output")
        teacher = logits_of(found, f"the output of teacher {self.teacher!r}")
        require_same_shape(student, teacher, self.teacher, "logits", _SAME_CLASSES)
        labels = require_labels(targets, student)
        hard = F.cross_entropy(
            student.flatten(0, -2), labels.flatten(), ignore_index=self.ignore_index
        )
        soft = masked_mean(
            soft_loss(student, teacher, self.temperature), labels != self.ignore_index
        )
        loss = self.hard_weight * hard + self.weight * soft
        return {"loss": loss, "soft": soft, "hard": hard}

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of targets that count, for `hocket.TokenMean`."""
        return (targets != self.ignore_index).sum()


def logits_of(output: Any, whose: str) -> Tensor:
    """Return a net's logits: its output, or the entry `logits` of a mapping.

    Raises:
        ModelError: there are none.
    """
    found = output.get("logits") if isinstance(output, Mapping) else output
    way_out = "return the logits as a tensor, or in a mapping under 'logits'"
    return widened(require_tensor(found, whose, way_out))


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(teacher || student) of probabilities softened by T.

    Args:
        student: logits (..., K).
        teacher: logits (..., K); no gradient goes there.
        temperature: T.

    Returns:
        (...): one number for each row of logits.
    """
    log_q = F.log_softmax(student / temperature, dim=-1)
    log_p = F.log_softmax(teacher.detach() / temperature, dim=-1)
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    return temperature**2 * kl.sum(-1)


def masked_mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over values that count; NaN where none does, as torch's losses.

    Indices would make an accelerator wait for the host.
    """
    return values.where(counted, 0.0).sum() / counted.sum()


# DistilBERT's three losses: soft targets, masked language modelling, hidden states.
#
# Sources: Sanh et al., arXiv:1910.01108, section 3; temperature and weights are those
# with which the authors trained (alpha_ce 5, alpha_mlm 2, alpha_cos 1, T = 2).
@dataclass(frozen=True, slots=True)
class DistilBERT:
    """Distils a masked language model with three losses.

        loss = soft_weight * T^2 * KL(teacher || student)       mean over tokens
             + mlm_weight * CE(student, labels)                 mean over masked tokens
             + cosine_weight * (1 - cos(student, teacher))      mean over tokens

    Padding does not count as tokens. Microbatches differ in two numbers, of tokens and
    of masked tokens, and one weight cannot serve both. So the second is taken to be
    `mlm_share` of the first, of which the authors' code masks exactly that share in
    each batch; each microbatch then weighs as much as it has tokens:

        loss = hocket.DistilBERT()
        hocket.Pipeline(student, hocket.TokenMean(loss, count=loss.count), ...)

    Both nets return logits (N, T, V) and last hidden states (N, T, D): a pair of them,
    or a mapping with `logits` and `hidden_states` (a tensor, or a sequence with the
    last one at its end, as transformers' models with `output_hidden_states=True`).
    Targets are labels (N, T), or a pair of them and the attention mask (N, T), which is
    0 for padding.

    Args:
        temperature: T.
        soft_weight: the weight of the soft targets' loss.
        mlm_weight: the weight of masked language modelling.
        cosine_weight: the weight of the hidden states' loss.
        mlm_share: the share of tokens that the data masks.
        ignore_index: the label of tokens that are not masked.
        teacher: the teacher's name.

    Raises:
        ConfigError: a number is not valid.

    Source: Sanh et al., arXiv:1910.01108, section 3.
    """

    temperature: float = 2.0
    soft_weight: float = 5.0
    mlm_weight: float = 2.0
    cosine_weight: float = 1.0
    mlm_share: float = 0.15
    ignore_index: int = -100
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        """Refuse numbers that make no loss."""
        require_positive(
            "DistilBERT", temperature=self.temperature, mlm_share=self.mlm_share
        )
        require_weights(
            "DistilBERT",
            soft_weight=self.soft_weight,
            mlm_weight=self.mlm_weight,
            cosine_weight=self.cosine_weight,
        )

    def __call__(
        self, output: Any, targets: Any, teachers: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Return the losses `loss`, which is trained, `soft`, `mlm` and `cosine`.

        Args:
            output: the student's logits and hidden states.
            targets: the labels, or a pair of them and the attention mask.
            teachers: the teachers' outputs by name; `.own` is read.

        Raises:
            ModelError: the outputs have another form, or do not match.
            ConfigError: there is no teacher of this name.
        """
        own = teacher_of(teachers, self.teacher, "DistilBERT").own
        logits, hidden = _parts(output, "the student's output")
        wanted = _parts(own, f"the output of teacher {self.teacher!r}")
        way_out = "distil with one tokenizer, and hidden states of one width"
        require_same_shape(logits, wanted[0], self.teacher, "logits", way_out)
        require_same_shape(hidden, wanted[1], self.teacher, "hidden states", way_out)
        labels, tokens = _labels_and_tokens(targets)
        labels = require_labels(labels, logits)
        soft = masked_mean(soft_loss(logits, wanted[0], self.temperature), tokens)
        cosine = 1 - F.cosine_similarity(hidden, wanted[1].detach(), dim=-1)
        cosine = masked_mean(cosine, tokens)
        mlm = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )
        mlm = mlm / self.mlm_share / tokens.sum()
        loss = (
            self.soft_weight * soft
            + self.mlm_weight * mlm
            + self.cosine_weight * cosine
        )
        return {"loss": loss, "soft": soft, "mlm": mlm, "cosine": cosine}

    def count(self, targets: Any) -> Tensor:
        """Return the number of tokens without padding, for `hocket.TokenMean`."""
        return _labels_and_tokens(targets)[1].sum()


def _parts(output: Any, whose: str) -> tuple[Tensor, Tensor]:
    """Return logits and last hidden states.

    Raises:
        ModelError: the output has neither form.
    """
    match output:
        case {"logits": Tensor() as logits, "hidden_states": Tensor() as hidden}:
            return widened(logits), widened(hidden)
        case {"logits": Tensor() as logits, "hidden_states": [*_, Tensor() as hidden]}:
            return widened(logits), widened(hidden)
        case [Tensor() as logits, Tensor() as hidden]:
            return widened(logits), widened(hidden)
    keys = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise ModelError(
        f"{whose} is a {type(output).__name__}{keys}: DistilBERT reads logits and last "
        "hidden states, a pair or a mapping with 'logits' and 'hidden_states' "
        "(transformers' models return them with output_hidden_states=True)"
    )


def _labels_and_tokens(targets: Any) -> tuple[Tensor, Tensor]:
    """Return labels, and which tokens are no padding, both (N, T).

    Raises:
        ModelError: the targets have neither form.
    """
    match targets:
        case Tensor():
            return targets, torch.ones_like(targets, dtype=torch.bool)
        case [Tensor() as labels, Tensor() as mask] if labels.shape == mask.shape:
            return labels, mask != 0
    shapes = [tuple(x.shape) for x in targets] if _are_tensors(targets) else targets
    raise ModelError(
        f"the targets are a {type(targets).__name__}, {shapes}: DistilBERT reads "
        "labels (N, T), or a pair of them and the attention mask of the same shape"
    )


def _are_tensors(values: Any) -> bool:
    is_sequence = isinstance(values, Sequence)
    return is_sequence and all(isinstance(x, Tensor) for x in values)
