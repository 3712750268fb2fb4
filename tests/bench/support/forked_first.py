"""`bench.gpu.first` with processes that are forked, and do not import torch again."""

from __future__ import annotations

import pytest

from bench.gpu import first
from tests.run.support.forked_python import ForkedPopen


def main() -> None:
    """Run it; its arguments are this process's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.gpu.part_process.Popen", ForkedPopen)
        patch.setitem(first.PARTS, "broken", first.Part("no_such_module", 20))
        first.main()


if __name__ == "__main__":
    main()
