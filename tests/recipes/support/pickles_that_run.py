"""A pickle that runs a command when it is read."""

from __future__ import annotations

from typing import Any


class Runs:
    """Pickled, it has a command run when it is read."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> Any:
        return self.call, self.args
