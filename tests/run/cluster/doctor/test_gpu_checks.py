"""The doctor on GPUs, those that are here and those that are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

from hocket.run.cluster.doctor.finding import Severity
from hocket.run.cluster.doctor.gpu import (
    Gpu,
    HostGpus,
    driver_version,
    judge_gpus,
    judge_nccl,
    probe_gpus,
)
from tests.run.cluster.doctor.test_host_checks import check

A100: Final = Gpu("NVIDIA A100-SXM4-80GB", 80 * 2**30)
NONE: Final = HostGpus("", "2.13.0+cpu", "", "", ())
TWO: Final = HostGpus("550.54", "2.13.0", "12.6", "", (A100, A100))


def test_no_gpu_is_said_plainly() -> None:
    """Nothing is wrong with it, whatever torch was built for."""
    check(judge_gpus(NONE, 2), Severity.OK, "no GPU", "runs on the CPU")
    check(judge_gpus(replace(NONE, cuda="12.6"), 2), Severity.OK, "no GPU")


def test_a_driver_and_a_torch_that_do_not_fit() -> None:
    """A build without CUDA only wastes the GPU; one that cannot use it is broken."""
    idle = replace(NONE, driver="550.54")
    check(judge_gpus(idle, 1), Severity.WARN, "driver 550.54", "2.13.0+cpu was built")
    old = replace(
        idle, cuda="13.0", error="The NVIDIA driver on your system is too old"
    )
    reported = ["for CUDA 13.0 cannot use it: The NVIDIA driver", "--gpus all"]
    check(judge_gpus(old, 1), Severity.FAIL, *reported)


def test_gpus_for_all_workers() -> None:
    """One each."""
    found = "2 x NVIDIA A100-SXM4-80GB with 80 GiB, driver 550.54"
    check(judge_gpus(TWO, 2), Severity.OK, found)
    reported = ["3 workers", "--nproc-per-node 2"]
    check(judge_gpus(TWO, 3), Severity.FAIL, *reported, "HOCKET_BACKEND=gloo")
    check(judge_gpus(TWO, 3, "gloo"), Severity.WARN, *reported, "share a GPU")


def test_nccl() -> None:
    """Several GPUs need it to exchange messages."""
    check(judge_nccl(replace(TWO, nccl="2.28.9")), Severity.OK, "NCCL 2.28.9")
    check(judge_nccl(TWO), Severity.FAIL, "2 GPUs cannot exchange messages")
    check(judge_nccl(replace(TWO, devices=(A100,))), Severity.OK, "one GPU needs none")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  "
            "Release Build\nGCC version: gcc 12\n",
            "570.86.15",
        ),
        ("something else\n", "of an unknown version"),
    ],
)
def test_the_driver_s_version(tmp_path: Path, text: str, version: str) -> None:
    """As NVIDIA's two kernel modules write it."""
    path = tmp_path / "version"
    assert driver_version(path) == ""
    path.write_text(text)
    assert driver_version(path) == version


def test_this_machine_is_asked() -> None:
    """What torch can use is what is reported."""
    found = probe_gpus()
    assert len(found.devices) == torch.cuda.device_count()
    assert found.torch == torch.__version__
    assert bool(found.nccl) == torch.distributed.is_nccl_available()
    assert judge_gpus(found, max(1, len(found.devices))).found
