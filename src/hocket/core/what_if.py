"""Change costs: a slower device, another link. "What would a faster link bring?"."""

from __future__ import annotations

from dataclasses import fields, replace

from hocket.core.costs import Costs, StageCost
from hocket.core.program import Program
from hocket.errors import CostsError


def with_slow_device(
    costs: Costs, program: Program, device: int, factor: float
) -> Costs:
    """Return costs where all ops of one device take `factor` times as long.

    Args:
        costs: the costs of the program.
        program: says which stages the device has.
        device: the device.
        factor: above 1 is slower, below 1 faster.

    Raises:
        CostsError: the program has no such device, or the factor is not above 0.
    """
    _check_device(program, device)
    if not factor > 0:
        raise CostsError(f"device {device}: a factor of {factor:g} is not above 0")
    stages = tuple(
        _slowed(cost, factor) if stage.device == device else cost
        for stage, cost in zip(program.stages, costs.of(program), strict=True)
    )
    return replace(costs, stages=stages, is_device_share=False)


def with_bandwidth(
    costs: Costs, program: Program, ends: tuple[int, int], bytes_per_s: float
) -> Costs:
    """Return costs where the link between two devices has another bandwidth.

    Both directions change; latencies stay.

    Args:
        costs: the costs of the program.
        program: says which devices there are.
        ends: the two devices.
        bytes_per_s: the bandwidth.

    Raises:
        CostsError: the program has no such device, or the bandwidth is not above 0.
    """
    for device in ends:
        _check_device(program, device)
    if not bytes_per_s > 0:
        raise CostsError(f"a bandwidth of {bytes_per_s:g} bytes/s is not above 0")
    a, b = ends
    links = {(x, y): link for x, y, link in reversed(costs.links)}
    for pair in ((a, b), (b, a)):
        old = costs.link_between(*pair)
        links[pair] = replace(old, bytes_per_s=bytes_per_s, name="")
    return replace(costs, links=tuple((x, y, link) for (x, y), link in links.items()))


def _check_device(program: Program, device: int) -> None:
    if not 0 <= device < program.num_devices:
        raise CostsError(
            f"there is no device {device}: the schedule has devices 0 to "
            f"{program.num_devices - 1}"
        )


def _slowed(cost: StageCost, factor: float) -> StageCost:
    names = [field.name for field in fields(cost) if field.name.endswith("_s")]
    changed: dict[str, float] = {name: getattr(cost, name) * factor for name in names}
    return replace(cost, **changed)  # type: ignore[arg-type]
