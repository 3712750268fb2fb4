"""The measured costs of each layer, saved as JSON and reused."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hocket.errors import ModelError
from hocket.model.capture.capture import Captured
from hocket.planner.work import HeldBytes, LayerCost, Weights

FORMAT = 5


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The costs of one layer for one microbatch.

    Args:
        name: the layer's name.
        forward_s: median seconds of F.
        input_grad_s: seconds of I.
        weight_grad_s: seconds of W; I and W together are the whole backward, divided in
            the ratio in which they take time when split.
        forward_spread_s: the distance between the quartiles of F.
        backward_spread_s: the distance between the quartiles of the whole backward.
        activation_bytes: what the forward makes and keeps for the backward.
        kept_input_bytes: what it keeps of its input, if no earlier layer does. A stage
            that begins with this layer holds it as a message that it received.
        received_bytes: the bytes of the message to a stage that begins with this layer.
        received_grad_bytes: the bytes of the message back.
        forward_work_bytes: the most allocated at once in a forward of which nothing is
            kept, its outputs included.
        backward_work_bytes: the most allocated at once in the backward, beyond the
            bytes at its begin.
        weight_grad_held_bytes: what the layer made that is held from I until W.
        held_input_bytes: what it received that is held from I until W.
        input_grad_work_bytes: the most allocated at once in I, beyond the bytes at its
            begin.
        weight_grad_work_bytes: the same for W.
        split_s: the overhead per microbatch, forward and backward, of a split backward;
            may be negative within the noise.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    forward_spread_s: float
    backward_spread_s: float
    activation_bytes: int
    kept_input_bytes: int
    received_bytes: int
    received_grad_bytes: int
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    weight_grad_held_bytes: int = 0
    held_input_bytes: int = 0
    input_grad_work_bytes: int = 0
    weight_grad_work_bytes: int = 0
    split_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    def cost(self, weights: tuple[Weights, ...] = ()) -> LayerCost:
        """Return the planner's cost of the layer.

        Args:
            weights: its parameters and buffers, in the planner's form.
        """

        def own(kind: type[LayerCost | HeldBytes]) -> dict[str, Any]:
            names = {field.name for field in fields(kind)} - {"weights", "split"}
            return {name: getattr(self, name) for name in names}

        split = HeldBytes(**own(HeldBytes))
        return LayerCost(**own(LayerCost), weights=weights, split=split)


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of all layers of a model, with its conditions.

    Args:
        layers: in the model's order.
        conditions: what the numbers depend on: model, shapes, device, versions.
    """

    layers: tuple[LayerProfile, ...]
    conditions: dict[str, str]

    @property
    def layer_s(self) -> tuple[float, ...]:
        """Seconds of each layer, forward and backward."""
        return tuple(layer.total_s for layer in self.layers)

    @property
    def key(self) -> str:
        """A name, equal for equal conditions."""
        return key_of(self.conditions)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "format": FORMAT,
            "conditions": self.conditions,
            "layers": [asdict(layer) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, value: Any, *, path: str = "<profile>") -> Profile:
        """Read what `to_json` returns.

        Raises:
            ModelError: the value is no profile of this format; names the path.
        """
        try:
            if value["format"] != FORMAT:
                raise ModelError(
                    f"{path}: profile of format {value['format']}, this hocket reads "
                    f"format {FORMAT}: delete it to have it measured again"
                )
            layers = tuple(LayerProfile(**layer) for layer in value["layers"])
            return cls(layers, {str(k): str(v) for k, v in value["conditions"].items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path}: not a profile: {error!r}") from None

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8"
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile that was saved.

        Raises:
            ModelError: the file is no profile; names the path.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
        return cls.from_json(value, path=str(path))


def conditions_of(captured: Captured, device: torch.device) -> dict[str, str]:
    """Return all that a profile's numbers depend on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "format": str(FORMAT),  # so that one of another format is not found
        "work": captured.digest,
        "num_samples": str(captured.example.num_samples),
        "device": device.type,
        "device_name": name,
        "host": platform.node(),
        "num_threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def key_of(conditions: dict[str, str]) -> str:
    """Return a short name for conditions, for file names."""
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_of(folder: Path, conditions: dict[str, str]) -> Path:
    """Return the file of the profile under these conditions."""
    return folder / f"profile-{key_of(conditions)}.json"


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of several workers' profiles of one model.

    Raises:
        ModelError: their layers differ.
    """
    first = profiles[0]
    names = [layer.name for layer in first.layers]
    for rank, other in enumerate(profiles):
        theirs = [layer.name for layer in other.layers]
        if theirs != names:
            raise ModelError(
                f"rank {rank} profiled the layers {', '.join(theirs)}, rank 0 "
                f"{', '.join(names)}: use the same model on every worker"
            )
    seconds = [x.name for x in fields(LayerProfile) if x.name.endswith("_s")]
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        means = {
            name: fmean(getattr(layer, name) for layer in same) for name in seconds
        }
        layers.append(LayerProfile(**{**asdict(same[0]), **means}))
    return Profile(tuple(layers), first.conditions)
