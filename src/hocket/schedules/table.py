"""Name all schedules: hocket's own, and those that other packages offer.

A package offers a schedule as an entry point, whose name is the schedule's:

    [project.entry-points."hocket.schedules"]
    my-schedule = "my_package.my_schedule:ENTRY"      # a hocket.schedules.Entry
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Final

from hocket.core.schedule import Schedule
from hocket.errors import PlanError, ShapeError
from hocket.nearest import nearest
from hocket.passes.add_gathers import add_gathers
from hocket.schedules import (
    chimera,
    dualpipe_v,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    ooo_fast_forward,
    ooo_modulo,
    pipedream,
    pipedream_2bw,
    reverse_first_k,
    tspipe,
    v_half,
    v_min,
    wpipe,
    wpipe_overlapped,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from hocket.schedules.entry import Entry, Shape

GROUP: Final = "hocket.schedules"

OURS: Final[Mapping[str, Entry]] = {
    "gpipe": gpipe.ENTRY,
    "1f1b": one_f_one_b.ENTRY,
    "interleaved-1f1b": interleaved_1f1b.ENTRY,
    "looped-bfs": looped_bfs.ENTRY,
    "zb-h1": zb_h1.ENTRY,
    "zb-h2": zb_h2.ENTRY,
    "zb-auto": zb_auto.ENTRY,
    "interleaved-zb": interleaved_zb.ENTRY,
    "zb-v": zb_v.ENTRY,
    "v-half": v_half.ENTRY,
    "v-min": v_min.ENTRY,
    "dualpipe-v": dualpipe_v.ENTRY,
    "hanayo": hanayo.ENTRY,
    "chimera": chimera.ENTRY,
    "ooo-fast-forward": ooo_fast_forward.ENTRY,
    "ooo-modulo": ooo_modulo.ENTRY,
    "pipedream": pipedream.ENTRY,
    "pipedream-2bw": pipedream_2bw.ENTRY,
    "wpipe": wpipe.ENTRY,
    "wpipe-overlapped": wpipe_overlapped.ENTRY,
    "tspipe": tspipe.ENTRY,
    "reverse-first-k": reverse_first_k.ENTRY,
    "forward-only": forward_only.ENTRY,
}


@cache
def all_schedules() -> Mapping[str, Entry]:
    """Return hocket's and other packages' entries by name; read once per process.

    Raises:
        PlanError: two schedules have one name, or an entry point offers no `Entry`.
    """
    return joined(OURS, entry_points(group=GROUP))


def joined(
    ours: Mapping[str, Entry], offers: Iterable[EntryPoint]
) -> Mapping[str, Entry]:
    """Join hocket's entries with those that other packages offer.

    Raises:
        PlanError: two schedules have one name, or an entry point offers no `Entry`.
    """
    schedules = dict(ours)
    homes = {name: f"hocket ({entry.make.__module__})" for name, entry in ours.items()}
    for offer in offers:
        package = offer.dist.name if offer.dist else "a package without a name"
        home = f"{package} ({offer.value})"
        if offer.name in schedules:
            raise PlanError(
                f"two schedules are named {offer.name!r}: one of {homes[offer.name]}, "
                f"one of {home}; rename or uninstall one"
            )
        entry = offer.load()
        if not isinstance(entry, Entry):
            raise PlanError(
                f"schedule {offer.name!r} of {home} is no hocket.schedules.Entry, but "
                f"of type {type(entry).__name__}"
            )
        schedules[offer.name], homes[offer.name] = entry, home
    return MappingProxyType(schedules)


def make_schedule(
    name: str,
    *,
    num_devices: int,
    num_microbatches: int,
    num_steps: int = 1,
    num_replicas: int = 1,
    num_shards: int = 1,
    stages_per_device: int | None = None,
    **options: object,
) -> Schedule:
    """Make a schedule of the table `SCHEDULES`.

    Args:
        name: the schedule's name in the table.
        num_devices: the devices of one replica.
        num_microbatches: the microbatches per step.
        num_steps: the steps of the order.
        num_replicas: copies of the whole pipeline, on other devices.
        num_shards: the devices that hold each stage of a replica together. With more
            than one, each stage is gathered once per step (see
            `hocket.passes.add_gathers`).
        stages_per_device: the stages per device; the schedule's default when not given.
        options: the schedule's own options.

    Raises:
        PlanError: the table has no schedule of that name, or the schedule has no such
            option; names the nearest. Or its order cannot be of sharded stages.
        ShapeError: the schedule does not take these numbers; names those that it does.

    >>> print(make_schedule("1f1b", num_devices=2, num_microbatches=2))
    d0  0F0 0F1 0B0 0B1 0U
    d1  1F0 1B0 1F1 1B1 1U
    """
    schedules = all_schedules()
    if name not in schedules:
        raise PlanError(f"no schedule is named {name!r}; {nearest(name, schedules)}")
    entry = schedules[name]
    for option in options:
        if option not in entry.options:
            raise PlanError(
                f"schedule {name!r} takes no option {option!r}; "
                f"{nearest(option, entry.options)}"
            )
    if stages_per_device is None:
        stages_per_device = entry.stages_per_device
    shape = Shape(
        num_devices,
        num_microbatches,
        stages_per_device,
        num_steps,
        num_replicas,
        num_shards,
    )
    made: Schedule = entry.make(shape, **options)
    if made.program.num_shards != num_shards:
        raise ShapeError(
            f"schedule {name!r} has no order of sharded stages, and was asked for "
            f"num_shards={num_shards}: use num_replicas, or another schedule"
        )
    return add_gathers(made)


def options_of(name: str) -> tuple[str, ...]:
    """Return a schedule's options; none if no schedule has this name."""
    entry = all_schedules().get(name)
    return () if entry is None else entry.options
