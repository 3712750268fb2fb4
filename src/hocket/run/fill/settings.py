"""The user's argument: what fills a pipeline's bubbles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.utils.data import default_collate

from hocket.errors import ConfigError


class IndexedSamples(Protocol):
    """A data set that is read by index, such as torch's map-style data sets."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Inference over a data set, in the waits of a pipeline's devices.

    Each device has the whole net, and does one forward after the other where it would
    wait for another device. How many fit into a step is decided from measured times.
    Every sample is done once, on one worker.

    Args:
        net: in evaluation mode (`net.eval()`); called without gradients.
        samples: a map-style data set, or a list: the net's inputs, without targets.
        on_output: `on_output(rows, output)` is called on the worker that did the
            samples `rows` (a range), after the step's result is known; the output is
            on the worker's device. After a resume, rows come again that were done
            since the checkpoint, and no others.
        batch_size: the samples of one forward: so few that it is shorter than a wait,
            and so many that 32 forwards fill a step's waits.
        max_slowdown: the share by which a step may become longer, as simulated.
        collate: makes the net's inputs of a list of samples; a tuple is passed as
            positional arguments, a dict as keyword arguments.

    Raises:
        ConfigError: an option is not valid, or the net is in training mode.
    """

    net: nn.Module = field(repr=False, compare=False)
    samples: IndexedSamples = field(repr=False, compare=False)
    on_output: Callable[[range, Any], object]
    _: KW_ONLY
    batch_size: int = 1
    max_slowdown: float = 0.02
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        """Check the options."""
        faults = [*self._faults()]
        if faults:
            raise ConfigError(f"fill: {'; '.join(faults)}")

    def _faults(self) -> Iterator[str]:
        if self.batch_size < 1:
            yield f"batch_size is {self.batch_size}: it must be at least 1"
        if self.max_slowdown < 0.0:
            yield f"max_slowdown is {self.max_slowdown}: it must be 0 or more"
        if not callable(self.on_output):
            yield "on_output must be a function of rows and output"
        if not (
            hasattr(self.samples, "__len__") and hasattr(self.samples, "__getitem__")
        ):
            yield (
                f"samples is a {type(self.samples).__name__}, which is not read by "
                "index: give a map-style data set (or a list), so that each sample is "
                "done once, also after a resume; for a DataLoader, its .dataset"
            )
        elif not len(self.samples):
            yield "samples is empty"
        training = [name for name, x in self.net.named_modules() if x.training]
        if training:
            yield (
                f"the net is in training mode ({training[0] or 'the net itself'}): its "
                "forwards would draw random numbers and change statistics. Call "
                "net.eval() before; what trains is the pipeline's model"
            )


def fill_faults(fill: Fill | None, model: nn.Module, *, freezes: bool) -> Iterator[str]:
    """Yield a sentence for each fault of a pipeline's `fill`.

    Args:
        fill: the argument.
        model: the model that is trained.
        freezes: whether layers freeze while training runs.
    """
    if fill is None:
        return
    if not isinstance(fill, Fill):
        yield f"fill is a {type(fill).__name__}: give hocket.Fill(net, samples, ...)"
        return
    if freezes:
        yield (
            "fill does not go with freeze: another layout has other workers and other "
            "waits, into which the forwards would have to be measured and placed "
            "again. Leave one of them out"
        )
    own = {id(x): name for name, x in model.named_parameters()}
    if shared := next((own[id(x)] for x in fill.net.parameters() if id(x) in own), ""):
        yield (
            f"the net of fill shares {shared} with the model that trains, so that its "
            "outputs would depend on the step: give a copy, such as "
            "copy.deepcopy(model).eval()"
        )
