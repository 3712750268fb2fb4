"""Checks the options of freezing, and writes them as text that workers compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pprint import pformat
from typing import Final

from hocket.freeze.cache.settings import Cache
from hocket.freeze.policy import Measures, Policy, interval_faults, is_whole

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
