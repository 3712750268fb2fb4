"""The measured costs of each layer, saved as JSON and reused."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from hocket import cuda, env
from hocket.core.costs import Link
from hocket.core.formats.documents import read_json
from hocket.errors import ModelError
from hocket.model.capture.capture import Captured
from hocket.planner.balance import Balancer
from hocket.planner.work import HeldBytes, LayerCost
from hocket.version import __version__

FORMAT = 6
_MOST: Final = 2**62  # bytes, or seconds
_MOST_SPREAD: Final = 1.0  # 0.2 to 0.35 where the machine is idle
_MOST_CORE_WAIT: Final = 0.1

_NOTHING: Final = HeldBytes()


@dataclass(frozen=True, slots=True)
class LayerProfile(LayerCost):
    """The costs of one layer for one microbatch, as they were measured.

    Seconds are medians. I and W together are the whole backward, divided in the ratio
    in which they take time when split. What an op allocates is the most at once, beyond
    the bytes at its begin; of a forward, its outputs included.

    Args:
        split: its memory with a split backward; it holds nothing when not given.
        forward_spread_s: the distance between the quartiles of F.
        backward_spread_s: the distance between the quartiles of the whole backward.
    """

    split: HeldBytes | None = _NOTHING
    forward_spread_s: float = 0.0
    backward_spread_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


_HELD: Final = tuple(x.name for x in fields(HeldBytes))
_OWN: Final = tuple(x.name for x in fields(LayerProfile))
_KEPT: Final = *(x for x in _OWN if x not in ("weights", "split")), *_HELD


def noise_of(core_wait: float, what: str) -> str:
    """Return why what was measured is used, but not kept; empty if it may be.

    Args:
        core_wait: the part of the time in which a worker waited for a core.
        what: what was measured.
    """
    if core_wait <= _MOST_CORE_WAIT or env.KEEP_BUSY.switch():
        return ""
    return (
        "other programs or threads had a worker's core for "
        f"{100 * core_wait:.0f} % of the time in which {what} measured"
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of all layers of a model, with its conditions.

    Args:
        layers: in the model's order.
        conditions: what the numbers depend on: model, shapes, device, versions.
        slowness: how many times longer than these numbers each rank's device takes;
            empty if all are of one kind. It is not saved: it belongs to a job.
        core_wait: the part of the time in which a worker waited for a core.
    """

    layers: tuple[LayerProfile, ...]
    conditions: dict[str, str]
    core_wait: float = 0.0
    slowness: tuple[float, ...] = ()

    @property
    def layer_s(self) -> tuple[float, ...]:
        """Seconds of each layer, forward and backward."""
        return tuple(layer.total_s for layer in self.layers)

    @property
    def spread(self) -> float:
        """The distances between the quartiles of all layers, by their seconds."""
        spread_s = sum(x.forward_spread_s + x.backward_spread_s for x in self.layers)
        return spread_s / max(sum(self.layer_s), 1e-9)

    @property
    def noise(self) -> str:
        """Why it is used, but not kept: the machine was busy. Empty if it was not."""
        noise = noise_of(self.core_wait, "the layers were")
        if noise or self.spread <= _MOST_SPREAD or env.KEEP_BUSY.switch():
            return noise
        return f"the layers' times spread by {100 * self.spread:.0f} %"

    def balanced(
        self, num_stages: int, link: Link, ranks: Sequence[Sequence[int]] = ()
    ) -> tuple[int, ...]:
        """Return the boundaries of the balanced cut; see `Balancer.cut`.

        Args:
            num_stages: the number of stages.
            link: the link between adjacent devices.
            ranks: the ranks that hold each stage, for devices of several kinds.
        """
        slowness = self.slowness and [max(self.slowness[r] for r in x) for x in ranks]
        balancer = Balancer.of(self.layers, link)
        return balancer.cut(num_stages, slowness)

    @property
    def key(self) -> str:
        """A name, equal for equal conditions."""
        return key_of(self.conditions)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "format": FORMAT,
            "conditions": self.conditions,
            "core_wait": self.core_wait,
            "layers": [
                {
                    name: getattr(layer.held if name in _HELD else layer, name)
                    for name in _KEPT
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, value: object, *, path: str = "<profile>") -> Profile:
        """Read what `to_json` returns.

        Raises:
            ModelError: the value is no profile of this format; names the path and the
                entry.
        """
        read = partial(_entry, path)
        found = read(value, "format", int)
        if found != FORMAT:
            raise ModelError(
                f"{path}: profile of format {found!r:.40}, this hocket reads "
                f"format {FORMAT}: delete it to have it measured again"
            )
        conditions = read(value, "conditions", dict)
        core_wait = _measured(path, value, "core_wait", "")
        layers = []
        for i, layer in enumerate(read(value, "layers", list)):
            own = {
                name: _measured(path, layer, name, f"layers[{i}].") for name in _KEPT
            }
            split = HeldBytes(**{name: own.pop(name) for name in _HELD})
            layers.append(LayerProfile(**own, split=split))
        texts = {str(k): str(v) for k, v in conditions.items()}
        return cls(tuple(layers), texts, core_wait)

    def check_layers(self, names: Sequence[str], path: Path | str) -> None:
        """Check that the profile is of these layers.

        Raises:
            ModelError: it is of others; names the path.
        """
        own = [layer.name for layer in self.layers]
        if own != [*names]:
            raise ModelError(
                f"{path}: a profile of the {len(own)} layers {', '.join(own):.200}, "
                f"but the model has the {len(names)} layers {', '.join(names):.200}: "
                "delete it to have it measured again"
            )

    def text(self) -> str:
        """Return the profile as JSON text."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_whole(path, self.text())

    @classmethod
    def parse(cls, text: str, path: str) -> Profile:
        """Read what `text` returns.

        Raises:
            ModelError: the text is no profile; names the path.
        """
        try:
            value = read_json(text)
        except ValueError as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
        return cls.from_json(value, path=path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile that was saved.

        Raises:
            ModelError: the file is no profile; names the path.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
        return cls.parse(text, str(path))


def _entry(
    path: str,
    value: object,
    name: str,
    kind: type[Any] | tuple[type[Any], ...],
    where: str = "",
) -> Any:
    """Return a value of a JSON object, which must be there and of this kind.

    Raises:
        ModelError: it is not; names the path and the place.
    """
    if not isinstance(value, dict) or name not in value:
        raise ModelError(f"{path}: not a profile: {where}{name} is missing")
    found = value[name]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ModelError(
            f"{path}: not a profile: {where}{name} is {reprlib.repr(found)}, and "
            "should be of another type"
        )
    return found


def _measured(path: str, layer: object, name: str, where: str) -> Any:
    """Return a layer's name, seconds or bytes, which must be possible.

    Raises:
        ModelError: they are not; names the path and the place.
    """
    if name == "name":
        return _entry(path, layer, name, str, where)
    is_bytes = name.endswith("_bytes")
    number = _entry(path, layer, name, int if is_bytes else (int, float), where)
    least = -_MOST if name == "split_s" else 0
    if not least <= number <= _MOST:  # NaN is not, either
        raise ModelError(
            f"{path}: not a profile: {where}{name} is {reprlib.repr(number)}, which "
            f"no {'size' if is_bytes else 'time'} is"
        )
    return number


def conditions_of(captured: Captured, device: torch.device) -> dict[str, str]:
    """Return all that a profile's numbers depend on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = cuda.device_name(device)
    return {
        "format": str(FORMAT),  # so that one of another format is not found
        "work": captured.digest,
        "num_samples": str(captured.example.num_samples),
        "device": device.type,
        "device_name": name,
        "host": platform.node(),
        "num_threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "hocket": __version__,
        "python": platform.python_version(),
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, also if several processes do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def key_of(conditions: dict[str, str]) -> str:
    """Return a short name for conditions, for file names."""
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def path_of(folder: Path, conditions: dict[str, str]) -> Path:
    """Return the file of the profile under these conditions."""
    return folder / f"profile-{key_of(conditions)}.json"


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of several workers' profiles of one model.

    Where their devices are of several kinds, it says by how much each one differs.

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
    seconds = [name for name in _KEPT if name.endswith("_s")]
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        means = {
            name: fmean(getattr(layer, name) for layer in same) for name in seconds
        }
        layers.append(replace(same[0], **means))
    whole_s = [sum(profile.layer_s) for profile in profiles]
    is_mixed = len({profile.conditions.get("device_name") for profile in profiles}) > 1
    slowness = tuple(s / fmean(whole_s) for s in whole_s) if is_mixed else ()
    return Profile(tuple(layers), first.conditions, slowness=slowness)
