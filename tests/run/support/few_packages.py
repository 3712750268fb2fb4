"""Trains in a process that may import torch, numpy and safetensors alone.

    python -m tests.run.support.few_packages

Prints the losses of three steps, as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Final

from tests.run.support.plainly import SGD
from tests.run.support.started import started

# torch, numpy, safetensors, and the packages without which torch is not imported.
ALLOWED: Final = frozenset(
    (
        *("torch", "torchgen", "functorch", "numpy", "safetensors", "nvidia"),
        *("typing_extensions", "sympy", "mpmath", "networkx", "filelock", "fsspec"),
        *("hocket", "tests"),
    )
)


class FewPackages:
    """Finds no package but those allowed, as if no other were installed.

    Args:
        finder: finds all packages.
    """

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, fullname: str, *where: Any) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        package = fullname.partition(".")[0]
        if package not in ALLOWED and package not in sys.stdlib_module_names:
            return None
        found: ModuleSpec | None = self._finder.find_spec(fullname, *where)
        return found


def main() -> None:
    """Train three steps on one worker."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    with started(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        nn.functional.mse_loss,
        SGD,
        batch,
    ) as pipeline:
        losses = [pipeline.step(batch).loss for _ in range(3)]
    print(json.dumps(losses))


if __name__ == "__main__":
    sys.meta_path[:] = map(FewPackages, sys.meta_path)
    main()
