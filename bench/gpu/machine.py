"""What the machine is: versions, the driver's own words, and what the doctor finds."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from bench.gpu.checked import Row, Setting, by_name

PACKAGES: Final = (
    *("torch", "numpy", "safetensors", "pydantic", "typer", "rich", "jinja2"),
    *("triton", "torchvision", "transformers", "pytest", "hypothesis"),
)
TOOLS: Final = ("gcc", "nvcc", "nvidia-smi", "nsys", "ncu")  # `compile` needs gcc
SMI_TIMEOUT_S: Final = 15


def gpus() -> dict[str, Any]:
    """Which GPUs, and what drives them."""
    count = torch.cuda.device_count()
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if count else None,
        "nccl": list(torch.cuda.nccl.version()) if has_nccl else None,
    }


def versions(_: Setting) -> Row:
    """Of the software, without hocket; None for what is not installed."""
    return {
        **gpus(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {name: shutil.which(name) for name in TOOLS},
    }


def nvidia_smi(setting: Setting) -> Row:
    """The driver's own table, and every detail that it has."""
    if not setting.on_gpu:
        return {"skipped": "needs a GPU"}
    ask = partial(subprocess.run, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    table, details = ask(["nvidia-smi"]), ask(["nvidia-smi", "-q"])
    return {
        "holds": table.returncode == 0,
        "table": table.stdout.splitlines(),
        "details": details.stdout.splitlines(),
    }


def import_pipeline(_: Setting) -> Row:
    """hocket's main class loads with the packages that are here."""
    import hocket
    from bench.in_turn import environment

    name = hocket.Pipeline.__name__
    return {"class": name, "hocket": hocket.__version__, **environment()}


def doctor(setting: Setting) -> Row:
    """The findings of `hocket doctor`; all of them, since each is worth a look."""
    from hocket.run.cluster.doctor.examine import examine_host

    return {"findings": [one.to_json() for one in examine_host()]}


CHECKS: Final = by_name(versions, nvidia_smi, import_pipeline, doctor)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
