"""Keeps Inductor's version of a region where it is faster and has the same results."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from hocket.core.costs import StageCost
from hocket.core.footprint import plan_memory
from hocket.core.op import Kind
from hocket.errors import HocketError
from hocket.passes.serial import serial
from hocket.run.device.device import Device
from hocket.run.outoforder.capture.captured_step import CapturedStep
from hocket.run.outoforder.capture.code import StepCode
from hocket.run.outoforder.capture.inductor import (
    CompiledRegion,
    RegionCompiler,
    with_compiled,
)
from hocket.run.outoforder.capture.regions import RegionKey
from hocket.run.outoforder.order.measure import measured_costs
from hocket.run.outoforder.play.step_player import StepPlayer, Tensors
from hocket.run.stage.compiled.capture import CannotCompileError
from hocket.run.stage.compiled.trial import check_close

log = logging.getLogger(__name__)

_LEAST_GAIN: Final = 0.02  # of a region's seconds: less may be noise
_MOST_S: Final = 120.0  # after so long, no other region is compiled
_MOST_LETTERS: Final = 300  # letters of torch's error message


class InductorWarning(UserWarning):
    """Regions stay as they are: not compiled, not tried, or with other results."""


def with_inductor(
    step: CapturedStep, given: Tensors, device: Device
) -> CapturedStep | None:
    """Compile a step's regions, and keep those that are faster than their operators.

    Args:
        step: the step.
        given: its tensors; weights, buffers and states change.
        device: the device.

    Returns:
        The step with these regions; None if there are none.

    Warns:
        InductorWarning: a region could not be compiled, computes something else, or
            was not tried in time.
    """
    measure = _Measure(step, given, device)
    plain = measure.costs(step.code)
    slowest = sorted(
        step.code.regions, key=lambda place: _seconds(plain, place), reverse=True
    )
    compiled = _compiled(RegionCompiler(step), slowest)
    if compiled:
        compiled = measure.matching(compiled)
    if not compiled:
        return None
    costs = measure.costs(with_compiled(step.code, compiled))
    faster = {
        place: region
        for place, region in compiled.items()
        if _seconds(costs, place) < _seconds(plain, place) * (1.0 - _LEAST_GAIN)
    }
    if not faster:
        return None
    kernels = "inductor" if step.kernels == "plain" else f"{step.kernels}, inductor"
    return replace(step, code=with_compiled(step.code, faster), kernels=kernels)


def _seconds(costs: Sequence[StageCost], place: RegionKey) -> float:
    cost = costs[place.unit]
    match place.kind:
        case Kind.FORWARD:
            return cost.forward_s
        case Kind.BACKWARD_INPUT:
            return cost.input_grad_s
        case Kind.BACKWARD_WEIGHT:
            return cost.weight_grad_s
    return cost.update_s


def _compiled(
    compiler: RegionCompiler, places: Sequence[RegionKey]
) -> dict[RegionKey, CompiledRegion]:
    """Compile regions in this order, as long as there is time.

    Raises:
        HocketError: as the compiler does.
        torch.OutOfMemoryError: a kernel that Inductor tries finds no memory.
    """
    found: dict[RegionKey, CompiledRegion] = {}
    begin_s = perf_counter()
    places = [place for place in places if place.kind is not Kind.UPDATE]
    for i, place in enumerate(places):
        if perf_counter() - begin_s > _MOST_S:
            warnings.warn(
                f"{len(places) - i} regions were not tried, and stay as they are: "
                f"Inductor has taken more than {_MOST_S:g} s for the {i} slowest ones",
                InductorWarning,
                stacklevel=2,
            )
            break
        try:
            region = compiler.compiled(place)
        except (HocketError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            _warn(place, error)
            if "InvalidCxxCompiler" in f"{type(error).__name__} {error}":
                break
        else:
            if region is not None:
                found[place] = region
    return found


def _warn(place: RegionKey, error: Exception) -> None:
    log.debug("%s is not compiled", place, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    if "InvalidCxxCompiler" in text:
        why = (
            "Inductor needs a C++ compiler and finds none; all regions stay as they "
            "are: install g++, or name a compiler in the environment variable CXX"
        )
    else:
        why = (
            f"{place.kind.value} of unit {place.unit} stays as it is, and is not "
            f"compiled: {text[:_MOST_LETTERS]}"
        )
    warnings.warn(why, InductorWarning, stacklevel=2)


class _Measure:
    """Plays the serial order of a step, with one or another code of its regions."""

    def __init__(self, step: CapturedStep, given: Tensors, device: Device) -> None:
        self._step, self._given, self._device = step, given, device
        self._order = serial(step.regions.program)

    def costs(self, code: StepCode) -> tuple[StageCost, ...]:
        """Return the seconds of each region."""
        ops = self._order.lanes[0].ops
        player = self._player(code)
        footprint = code.footprint
        return measured_costs(player, ops, self._given, footprint, self._device).stages

    def matching(
        self, compiled: Mapping[RegionKey, CompiledRegion]
    ) -> dict[RegionKey, CompiledRegion]:
        """Run each region as operators and compiled; return those that agree."""
        matching = dict(compiled)
        regions = dict(self._step.code.regions)
        for place, region in compiled.items():
            reject = partial(matching.pop, place)
            regions[place] = replace(region.plain, run=_both(place, region, reject))
        self._player(replace(self._step.code, regions=regions)).play(self._given)
        return matching

    def _player(self, code: StepCode) -> StepPlayer:
        plan = plan_memory(self._order, code.footprint)
        losses = frozenset(self._step.losses.values())
        return StepPlayer(code, losses, self._step.written, plan, self._device)


def _both(
    place: RegionKey, region: CompiledRegion, reject: Callable[[], object]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    plain = region.plain

    def run(inputs: list[Tensor]) -> Sequence[Tensor]:
        given = [*inputs]
        try:
            found = region.results([*inputs])
        except Exception as error:
            _warn(place, error)
            reject()
            return plain.run(inputs)
        expected = plain.run(inputs)  # and the buffers, in place
        num = len(expected)
        try:
            _check_results(found[:num], expected, given)
            for new, i in zip(found[num:], region.assigned, strict=True):
                check_close(new, given[i])
        except CannotCompileError as error:
            _warn(place, error)
            reject()
        return expected

    return run


def _check_results(
    actual: Sequence[Tensor], expected: Sequence[Tensor], given: Sequence[Tensor]
) -> None:
    """Check that results are those of the region's operators, and lie as these do.

    Raises:
        CannotCompileError: one has other values or strides, takes more memory, or
            shares it with another tensor.
    """
    for ours, theirs in zip(actual, expected, strict=True):
        check_close(ours, theirs)
        num_bytes = ours.untyped_storage().nbytes()
        most_bytes = theirs.untyped_storage().nbytes()
        if ours.stride() != theirs.stride() or num_bytes > most_bytes:
            raise CannotCompileError(
                f"compiled, a result has strides {ours.stride()} in {num_bytes:,} "
                f"bytes, not {theirs.stride()} in {most_bytes:,}"
            )
    if _shared(actual, given) != _shared(expected, given):
        raise CannotCompileError("compiled, results share memory with other tensors")


def _shared(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the first one that lies in the same memory."""
    storages = [x.untyped_storage() for x in (*given, *tensors)]
    places = [storage.data_ptr() for storage in storages]
    return [
        places.index(place) if storage.nbytes() else -1
        for place, storage in zip(places, storages, strict=True)
    ]
