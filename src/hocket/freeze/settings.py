"""The settings of the cache, `hocket.Cache`, and checks of all options of freezing.

Options are written as text, too, which workers compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, is_dataclass
from pathlib import Path
from pprint import pformat
from typing import Final

from hocket.errors import ConfigError
from hocket.freeze.policy import Measures, Policy, interval_faults, is_whole

_DTYPES = (None, "bfloat16")


@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps the outputs of frozen layers, of each sample, in memory and on disk.

    Args:
        folder: where the files are; made if it does not exist. Workers and jobs may
            share it, and hosts may have their own.
        ram_bytes: the most memory that each worker keeps outputs in; 0 for none.
        disk_bytes: the most that each worker writes to the folder; 0 for none.
        dtype: "bfloat16" keeps half as many bytes, rounded; as computed when not given.
        draws_once: random transforms of a sample are drawn once, and are the same in
            each epoch (as with `SampleLoader(varied=False)`); without it, loaders whose
            samples vary are refused.

    Raises:
        ConfigError: an argument is of another type, or out of its range; names all
            such arguments.
    """

    folder: str | Path
    _: KW_ONLY
    ram_bytes: int
    disk_bytes: int
    dtype: str | None = None
    draws_once: bool = False

    def __post_init__(self) -> None:
        """Check the folder and the numbers."""
        faults = [
            f"{name} is {value!r}: give a number of bytes, such as 8 << 30, 0 for none"
            for name, value in self._budgets.items()
            if not is_whole(value, 0)
        ]
        folder: object = self.folder
        if not isinstance(folder, str | Path):
            faults.append(f"folder is {folder!r}: give a path")
        if not any(self._budgets.values()):
            faults.append("ram_bytes and disk_bytes are both 0: give one of them")
        if self.dtype not in _DTYPES:
            faults.append(
                f'dtype is {self.dtype!r}: take "bfloat16", or leave it out to keep '
                "outputs as they are computed"
            )
        if faults:
            raise ConfigError(f"Cache({self.folder!s}): {'; '.join(faults)}")

    @property
    def _budgets(self) -> dict[str, int]:
        return {"ram_bytes": self.ram_bytes, "disk_bytes": self.disk_bytes}


_NEEDED: Final = ("every_steps", "layers", "measures", "begin", "observe", "decide")


def type_faults(
    policy: object, shapes: object, num_run_steps: object, cache: object
) -> Iterator[str]:
    """Yield a sentence for each argument that is of another type, or out of its range.

    Args:
        policy: the argument `freeze` of `hocket.PipelineConfig`.
        shapes: its argument of this name.
        num_run_steps: its argument of this name.
        cache: its argument of this name.
    """
    yield from _policy_faults(policy)
    if shapes is not None and not _are_shapes(shapes):
        yield (
            f"shapes is {shapes!r:.200}: give stages and replicas from so many frozen "
            "layers on, as {4: (2, 2), 6: (1, 4)}"
        )
    if num_run_steps is not None and not is_whole(num_run_steps, 1):
        yield f"num_run_steps is {num_run_steps!r}: take 1, 2, ..., or leave it out"
    if cache is not None and not isinstance(cache, Cache):
        yield (
            f"cache is {cache!r:.60}: give hocket.Cache(folder, ram_bytes=8 << 30, "
            "disk_bytes=60 << 30)"
        )


def _policy_faults(policy: object) -> Iterator[str]:
    if isinstance(policy, type):
        yield f"freeze is the class {policy.__name__}: give an object of it"
        return
    missing = [name for name in _NEEDED if not hasattr(policy, name)]
    if missing:
        yield (
            f"freeze is {type(policy).__name__} {policy!r:.60}, which has no "
            f"{', '.join(missing)}: give a policy, such as hocket.freeze.Alpha(1 / 5)"
        )
        return
    every_steps, layers, measures = (getattr(policy, name) for name in _NEEDED[:3])
    faults = interval_faults(every_steps, layers)
    if not isinstance(measures, Measures):
        faults.append(
            f"measures is {measures!r:.60}: take one of hocket.freeze.Measures"
        )
    if faults:
        yield f"freeze={type(policy).__name__}(...): {', '.join(faults)}"


def _are_shapes(shapes: object) -> bool:
    return isinstance(shapes, Mapping) and all(
        is_whole(num_frozen, 0)
        and isinstance(shape, Sequence)
        and len(shape) == 2
        and all(is_whole(number, 1) for number in shape)
        for num_frozen, shape in shapes.items()
    )


def text_of(option: object) -> str:
    """Return an option of freezing as text, which workers compare.

    Of a cache, the text has only the options that all workers must share. Of a policy
    that is no dataclass, it has the class name, `every_steps`, `layers` and `measures`.

    Args:
        option: a policy, a cache, shapes, or a plain value.

    >>> text_of({6: (1, 4), 4: (2, 2)}) == text_of({4: (2, 2), 6: (1, 4)})
    True
    """
    if isinstance(option, Cache):
        option = (option.dtype, option.draws_once)  # folder and budgets may differ
    elif isinstance(option, Policy) and not is_dataclass(option):
        name = type(option).__qualname__
        option = (name, option.every_steps, option.layers, option.measures)
    # With width=1, pformat sorts sets, too; addresses differ between processes.
    return re.sub(r" at 0x[0-9a-f]+", "", pformat(option, width=1))
