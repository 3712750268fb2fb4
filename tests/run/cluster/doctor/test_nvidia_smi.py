"""The doctor reads `nvidia-smi`, and judges memory, clocks and settings of GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from hocket.run.cluster.doctor.finding import Severity
from hocket.run.cluster.doctor.gpu import (
    judge_clocks,
    judge_cuda_settings,
    judge_gpu_memory,
)
from hocket.run.cluster.doctor.nvidia_smi import (
    ClockLimit,
    GpuProcess,
    GpuState,
    parse_gpu_states,
    probe_gpu_states,
)
from tests.run.cluster.doctor.test_host_checks import check

GIB: Final = 2**30
MIB: Final = 2**20
FIRST: Final = "GPU-6e2a1c53-90f4-3d0f-8b7e-0f1d2c3b4a59"
SECOND: Final = "GPU-0b9f8e7d-6c5b-4a39-2817-161504f3e2d1"

# Each query's output, with `--format=csv,noheader,nounits`.
STATES: Final = f"""\
{FIRST}, 0, 81559, 81004, 345, 1980
{SECOND}, 1, 81559, 612, 1155, 1980
"""
LIMITS: Final = f"""\
{FIRST}, 0x0000000000000001
{SECOND}, 0x0000000000000044
"""
PROCESSES: Final = f"""\
{SECOND}, 4242, /opt/torch/bin/python3, 71000
{SECOND}, 4243, train --sizes 1, 2, 9000
{SECOND}, 4244, [Not Found], [N/A]
"""
FREE: Final = GpuState(FIRST, 0, 81559 * MIB, 81004 * MIB, 345, 1980)


def test_parses_every_query() -> None:
    """Idleness (1) and the power limit (4) are normal; heat (0x40) is not.

    A program's name may have commas in it.
    """
    first, second = parse_gpu_states(STATES, LIMITS, PROCESSES)
    assert first == FREE
    assert second.limits is ClockLimit.HEAT
    assert second.processes == (
        GpuProcess(4242, "/opt/torch/bin/python3", 71000 * MIB),
        GpuProcess(4243, "train --sizes 1, 2", 9000 * MIB),
        GpuProcess(4244, "[Not Found]", 0),
    )


def test_parses_what_a_driver_does_not_report() -> None:
    """Virtual GPUs, old ones and containers report only some of the fields."""
    states = f"{FIRST}, 0, 16384, 16000, [N/A], [Not Supported]\n"
    (state,) = parse_gpu_states(states, f"{FIRST}, [N/A]\n", "")
    assert state == GpuState(FIRST, 0, 16384 * MIB, 16000 * MIB, 0, 0)
    assert parse_gpu_states("No devices were found\n", "", "") == ()


def test_asks_an_old_driver_by_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown field fails the whole query, so the reasons are a query of theirs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*event_reasons*) echo "Field is not a valid field to query."; exit 2;;\n'
        f'*throttle_reasons*) printf "{LIMITS}";;\n'
        f'*compute-apps*) printf "{PROCESSES}";;\n'
        f'*) printf "{STATES}";;\n'
        "esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe_gpu_states() == parse_gpu_states(STATES, LIMITS, PROCESSES)


def test_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the driver's library and not its tools."""
    monkeypatch.setenv("PATH", "")
    assert probe_gpu_states() == ()
    reported = ["`nvidia-smi` is missing", "NVIDIA_DRIVER_CAPABILITIES"]
    check(judge_gpu_memory(()), Severity.WARN, *reported)
    check(judge_clocks(()), Severity.WARN, *reported)


def test_memory_that_others_hold() -> None:
    """Who holds it is named, but not this process itself."""
    check(judge_gpu_memory([FREE]), Severity.OK, "at least 79.11 GiB free")
    _, full = parse_gpu_states(STATES, LIMITS, PROCESSES)
    reported = [
        "GPU 1 has 612 MiB of 79.65 GiB free",
        "python3 (process 4242, 69.34 GiB)",
    ]
    check(judge_gpu_memory([FREE, full]), Severity.FAIL, *reported, "kill PID")
    own = GpuProcess(os.getpid(), "python", GIB)
    half = replace(FREE, free_bytes=40 * GIB, processes=(own,))
    reported = ["40 GiB of 79.65 GiB free", "no process that can be seen"]
    check(judge_gpu_memory([half]), Severity.WARN, *reported)


@pytest.mark.parametrize(
    ("limits", "reported"),
    [
        (ClockLimit.HEAT, ("lowered by heat:", "cooling")),
        (ClockLimit.HEAT | ClockLimit.SOFTWARE_HEAT, ("lowered by heat:", "cooling")),
        (ClockLimit.POWER_BRAKE, ("the power supply", "345 of 1980 MHz")),
        (ClockLimit.USER, ("a user setting", "nvidia-smi -rgc -rac")),
    ],
)
def test_lowered_clocks(limits: ClockLimit, reported: tuple[str, ...]) -> None:
    """One GPU that is slower than the others slows down the pipeline."""
    check(judge_clocks([FREE]), Severity.OK, "at most 1980 MHz")
    slow = replace(FREE, limits=limits)
    check(judge_clocks([FREE, slow]), Severity.WARN, "GPU 0 at", *reported)


def test_settings_that_let_kernels_wait_for_messages() -> None:
    """With several GPUs; one GPU receives nothing."""
    check(judge_cuda_settings("EAGER", "32", 8), Severity.OK, "need not wait")
    check(judge_cuda_settings("", "", 8), Severity.OK, "need not wait")
    check(judge_cuda_settings("LAZY", "", 1), Severity.OK, "need not wait")
    reported = ["CUDA_MODULE_LOADING is LAZY", "unset CUDA_MODULE_LOADING"]
    check(judge_cuda_settings("LAZY", "", 2), Severity.WARN, *reported)
    reported = ["CUDA_DEVICE_MAX_CONNECTIONS=1: with so few", "unset CUDA_DEVICE_MAX"]
    check(judge_cuda_settings("EAGER", "1", 1), Severity.WARN, *reported)
