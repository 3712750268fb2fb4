"""The order in which samples are trained on, and the position in it.

    epoch 0   7 2 5 │ 0 8 3 │ 6 1 4      a permutation that follows from seed and epoch
    epoch 1   3 0 6 │ 8 1 7 │ 2 4 5
                  position ▲             state_dict(): {"epoch": 1, "position": 3, ...}

The position is counted in samples, and moves when training takes a batch, not when it
is fetched ahead of time. So resuming from it, even with another batch size or number of
replicas, repeats no sample and skips none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from hocket.errors import DataError
from hocket.run.data.reading_processes import begun

Batch = TypeVar("Batch")

_VERSION: Final = 1
_SEEDS: Final = 2**32
_EPOCHS_APART: Final = 1_000_003  # a prime: seeds and epochs do not meet


@dataclass(frozen=True, slots=True)
class SamplerPosition:
    """The position of the next batch.

    Args:
        epoch: the epoch, from 0.
        position: samples of the epoch that come before.
        num_batches: batches taken before, over all epochs.
    """

    epoch: int = 0
    position: int = 0
    num_batches: int = 0


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one batch.

    Args:
        epoch: the batch's epoch.
        rows: the rows: shape (B,), int64.
    """

    epoch: int
    rows: Tensor


@dataclass(eq=False)
class ResumableSampler:
    """Batches of rows for a DataLoader (`batch_sampler=`), resumable at any batch.

    Every worker makes the same one: the order depends on seed and epoch alone. A pass
    over it goes from its position to the end of the epoch, or to `num_batches`.

        sampler = ResumableSampler(len(dataset), 32, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for result in pipeline.train(sampler.counted(loader)):
            pipeline.save("run/", data=sampler.state_dict())

    Args:
        num_samples: the number of rows of the data set.
        batch_size: samples per batch, over all microbatches and replicas.
        seed: seeds the order; 0 to 2**32 - 1.
        shuffle: whether each epoch has an order of its own; else rows come as they are.
        drop_last: leave out what does not fill a batch at the end of an epoch.
        num_batches: the batches over all epochs, after which a pass ends; each pass
            ends with its epoch when not given.

    Raises:
        DataError: there are no samples, no full batch, or a number is out of range.
    """

    num_samples: int
    batch_size: int
    _: KW_ONLY
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    num_batches: int | None = None

    def __post_init__(self) -> None:
        """Begin at the first batch."""
        self._current = SamplerPosition()
        if self.num_samples < 1:
            raise DataError("the data set is empty: there is no sample to draw")
        if self.batch_size < 1:
            raise DataError(f"a batch of {self.batch_size} samples: give at least 1")
        if not 0 <= self.seed < _SEEDS:
            raise DataError(f"seed {self.seed} is not from 0 to {_SEEDS - 1}")
        if not self.batches_per_epoch:
            raise DataError(
                f"{self.num_samples} samples do not fill one batch of "
                f"{self.batch_size}, and drop_last leaves out the rest: use a smaller "
                "batch size, or drop_last=False"
            )

    @property
    def current(self) -> SamplerPosition:
        """The position of the next batch."""
        return self._current

    @property
    def batches_per_epoch(self) -> int:
        """How many batches a whole epoch has."""
        return self._batches_in(self.num_samples)

    def order(self, epoch: int) -> Tensor:
        """Return all rows in an epoch's order: (num_samples,), int64."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(self.seed * _EPOCHS_APART + epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def upcoming(self) -> Iterator[BatchRows]:
        """Yield the batches to the end of the pass, without advancing."""
        current, first = self._current, self._current.epoch
        epoch, order = -1, torch.empty(0)
        while not self._ends(current, first):
            if current.epoch != epoch:
                epoch, order = current.epoch, self.order(current.epoch)
            end = current.position + self.batch_size
            yield BatchRows(epoch, order[current.position : end])
            current = self._after(current)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of `upcoming`, as a DataLoader expects them."""
        for batch in self.upcoming():
            yield batch.rows.tolist()

    def __len__(self) -> int:
        """Return the number of batches left in this pass."""
        if self.num_batches is None:
            return self._batches_in(self.num_samples - self._current.position)
        return max(0, self.num_batches - self._current.num_batches)

    def advance(self) -> None:
        """Advance the position by one batch."""
        self._current = self._after(self._current)

    def counted(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches, advancing the position with each.

        Args:
            loader: reads from this sampler, however far ahead.
        """
        for batch in begun(loader):
            self.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON."""
        return {"version": _VERSION, **self._identity(), **asdict(self._current)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position.

        The batch size, `drop_last`, `num_batches` and the number of replicas may be
        others than when the state was made: it counts samples.

        Raises:
            DataError: the state is malformed, or belongs to another order: other data,
                seed or shuffling would repeat some samples and skip others.
        """
        _check_form(state)
        for name, own in self._identity().items():
            if state[name] != own:
                raise DataError(
                    f"this position was saved with {name} {state[name]}, and "
                    f"now it is {own}: resuming would repeat some samples and leave "
                    f"out others. Use {name} {state[name]} again, or start over"
                )
        if state["position"] > self.num_samples:
            raise DataError(
                f"position {state['position']} is behind the last of "
                f"{self.num_samples} samples: the state has been changed by hand"
            )
        current = SamplerPosition(
            state["epoch"], state["position"], state["num_batches"]
        )
        self._current = self._normal(current)

    def _identity(self) -> dict[str, Any]:
        """Return what the order depends on besides the epoch."""
        return {
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _batches_in(self, num_samples: int) -> int:
        if self.drop_last:
            return num_samples // self.batch_size
        return -(-num_samples // self.batch_size)

    def _ends(self, current: SamplerPosition, first_epoch: int) -> bool:
        if self.num_batches is None:
            return current.epoch > first_epoch
        return current.num_batches >= self.num_batches

    def _after(self, current: SamplerPosition) -> SamplerPosition:
        position = min(current.position + self.batch_size, self.num_samples)
        return self._normal(
            SamplerPosition(current.epoch, position, current.num_batches + 1)
        )

    def _normal(self, current: SamplerPosition) -> SamplerPosition:
        """Move a position behind an epoch's last batch to the next epoch's begin."""
        if self._batches_in(self.num_samples - current.position):
            return current
        return SamplerPosition(current.epoch + 1, 0, current.num_batches)


def _check_form(state: Mapping[str, Any]) -> None:
    """Raise DataError for a state that no `state_dict` has returned.

    Raises:
        DataError: names what is missing or wrong.
    """
    if state.get("version") != _VERSION:
        raise DataError(
            f"a position in the data of version {state.get('version')!r}; this hocket "
            f"reads version {_VERSION}"
        )
    for name in ("num_samples", "seed", "epoch", "position", "num_batches"):
        value = state.get(name)
        if type(value) is not int or value < 0:
            raise DataError(
                f"a position in the data needs a natural number {name!r}, got "
                f"{value!r}: give what state_dict() returned"
            )
    if type(state.get("shuffle")) is not bool:
        raise DataError(
            f"a position in the data needs 'shuffle' true or false, got "
            f"{state.get('shuffle')!r}: give what state_dict() returned"
        )
