"""A mode in which each of torch's operators is seen when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")


def _untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep torch's compiler from tracing a function, without importing it.

    It still traces what the function calls: so `runs_compiled` sees it.
    """
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


class OperatorMode(TorchDispatchMode):
    """A base for modes that leaves torch's compiler alone.

    To keep its compiler from tracing a mode, torch imports it, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the compiler from tracing the mode."""
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        _untraced(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import torch's compiler."""
        return False


@_untraced
def runs_compiled() -> bool:
    """Return whether the calling operator is in code that `torch.compile` has made.

    Under a mode such code runs eagerly. The rest of it is not traced after this.
    """
    if eval_frame.get_eval_frame_callback() is None:
        return False
    eval_frame.set_eval_frame(None)
    return True
