"""The pipeline's step beside a plain loop's, on one device; few rounds."""

from __future__ import annotations

from typing import Final

import torch

from bench.gpu.checked import Row, Setting, by_name
from bench.gpu.run import SIZES, measure_case
from hocket.run.cluster.world import single_process_world

NUM_ROUNDS: Final = {"narrow": 8, "wide": 4}  # a wide step takes a second or two


def _measure(name: str, setting: Setting) -> Row:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    cases = SIZES["full" if setting.on_gpu and not setting.quick else "small"]
    case = next(case for case in cases if case.name == name)
    world = single_process_world(setting.device)
    row = measure_case(case, world, setting.size(NUM_ROUNDS[name], 2))
    return {**row, "holds": row["spans"]["holds"]}


def wide(setting: Setting) -> Row:
    """Large products: what hocket adds should not be seen."""
    return _measure("wide", setting)


def narrow(setting: Setting) -> Row:
    """Small products: the host's launches are most of the step."""
    return _measure("narrow", setting)


CHECKS: Final = by_name(narrow, wide)
