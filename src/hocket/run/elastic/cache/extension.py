"""Finds the layers that extend what is kept to a later boundary.

kept of  [a b]      before
run      [c d]      between, on what is kept of b
keep     [a b c d]  now
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.outline import on_tensors
from hocket.run.elastic.cache.output_rows import FrozenPart
from hocket.run.nets.net import NetOnWorker
from hocket.run.stage.precision import Precision
from hocket.run.stage.runner import StageRunner


@dataclass(frozen=True, slots=True)
class Extension:
    """What extends outputs that are kept.

    Args:
        before: the frozen layers of before.
        between: runs those that have been frozen since.
    """

    before: FrozenPart
    between: StageRunner


@dataclass(frozen=True, slots=True)
class PartMaker:
    """Makes the parts of a net whose outputs are kept.

    Args:
        net: the net, with this worker's stages.
        precision: the type that it computes in.
        device: where it runs.
        kept_as: the type that floating-point numbers are kept in; None: as computed.
    """

    net: NetOnWorker
    precision: Precision
    device: torch.device
    kept_as: str | None

    def part(self, runner: StageRunner) -> FrozenPart:
        """Return the part that a runner runs."""
        digest = prefix_digest(runner.module, self.device, self.precision, self.kept_as)
        return FrozenPart(runner, digest, self.kept_as)

    def extension(
        self,
        before: int,
        boundary: int,
        present: StageModule,
        kept: FrozenPart | None,
    ) -> Extension | None:
        """Return what extends outputs at one boundary to another.

        Args:
            before: the boundary of what is kept.
            boundary: the present one.
            present: all frozen layers.
            kept: the part in front of the former boundary; None if it was not here.

        Returns:
            None where other values cross the boundaries than the layers between give.
        """
        if not 0 < before < boundary:
            return None
        outline = on_tensors(self.net.outline, self.net.tensors)
        cut_at = (before, boundary)
        [between] = cut(outline, cut_at, only=[1])
        if [x.name for x in between.outputs] != [x.name for x in present.outputs]:
            return None
        if kept is None or not self._is_present(kept):
            [first] = cut(outline, cut_at, only=[0])
            kept = self.part(self._runner(first))
        outputs = kept.runner.module.outputs
        if [x.name for x in between.inputs] != [x.name for x in outputs]:
            return None
        return Extension(kept, self._runner(between))

    def _is_present(self, kept: FrozenPart) -> bool:
        """Whether a part has the net's present weights: others may have been loaded."""
        module, tensors = kept.runner.module, self.net.tensors
        first_name = self.net.outline.state.first_name
        own = (*module.named_parameters(), *module.named_buffers())
        is_same = all(tensors.get(first_name[name]) is x for name, x in own)
        return is_same and self.part(kept.runner).digest == kept.digest

    def _runner(self, module: StageModule) -> StageRunner:
        runner = StageRunner(
            module.index,
            module,
            None,
            device=self.device,
            seed=0,
            precision=self.precision,
            trainable=False,
            training=False,
        )
        runner.train(mode=False)
        return runner


def prefix_digest(
    module: StageModule, device: torch.device, precision: Precision, kept_as: str | None
) -> bytes:
    """Return 16 bytes that depend on the work, the weights and the buffers.

    Also on the kind of device and torch's version, since kernels round differently.

    Args:
        module: the frozen layers.
        device: where they run.
        precision: the type that they compute in.
        kept_as: the type that their outputs are kept in.
    """
    code = module.code_in(training=False)
    found = sha256()
    about = (device.type, torch.__version__, precision.value, kept_as)
    found.update(f"{about}\n{code.graph.python_code('self').src}".encode())
    for name, value in sorted(vars(code.objects).items()):
        _add(found, name, value)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _add(found, name, tensor)
    return found.digest()[:16]


def model_digest(captured: Captured) -> str:
    """Return a digest of a model's names and shapes, whatever its weights."""
    tensors = captured.state.tensors.items()
    text = "\n".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors)
    return sha256(text.encode()).hexdigest()[:32]


def _add(found: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        text = re.sub(r" at 0x[0-9a-f]+", "", f"{name} {value!r}\n")
        found.update(text.encode())
        return
    found.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
    flat = value.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy().data)
