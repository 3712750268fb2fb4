"""Opens what `weights=` names: safetensors, or a checkpoint of a pipeline's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from torch import Tensor, nn

from hocket.model.weights.folder import open_folder
from hocket.model.weights.fresh import FreshWeights
from hocket.model.weights.given import GivenWeights
from hocket.model.weights.stored import StoredWeights
from hocket.run.checkpoint.format.folder import LATEST, saved
from hocket.run.checkpoint.format.manifest import MANIFEST, Section
from hocket.run.checkpoint.format.newest import find
from hocket.run.checkpoint.format.opened import (
    BY_NAME,
    OpenedCheckpoint,
    open_checkpoint,
    read_tensor,
)


def given_weights(
    model: nn.Module, weights: str | Path | FreshWeights | GivenWeights | None
) -> GivenWeights | None:
    """Open the weights that a pipeline is given, and prepare its model for them.

    Args:
        model: the model.
        weights: see `hocket.PipelineConfig`.

    Raises:
        ModelError: they are not there, or do not fit the model.
        CheckpointError: the checkpoint is damaged.
    """
    if weights is None or isinstance(weights, GivenWeights):
        return weights
    if isinstance(weights, FreshWeights):
        return GivenWeights(model, weights)
    path = Path(weights)
    if (path / MANIFEST).is_file():
        return GivenWeights(model, _of_checkpoint(open_checkpoint(path)))
    if path.is_dir() and saved(path):
        return GivenWeights(model, _of_checkpoint(open_checkpoint(find(path, LATEST))))
    return GivenWeights(model, open_folder(path))


def _of_checkpoint(opened: OpenedCheckpoint) -> StoredWeights:
    """Return a checkpoint's weights; each tensor is checked against its hash."""
    locations = opened.locations(Section.WEIGHTS)
    forms = {
        name: (str(BY_NAME[x.record.dtype]).removeprefix("torch."), x.record.shape)
        for name, x in locations.items()
    }

    def read(names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, read_tensor(locations[name], name)

    return StoredWeights(str(opened.path), forms, read, opened.extra)
