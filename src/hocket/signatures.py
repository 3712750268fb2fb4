"""Functions that take the fields of a dataclass as their arguments.

    @takes_fields_of(PlanConfig)
    def plan(config: PlanConfig) -> Ranking: ...      called as plan(num_devices=8, ...)

The name, type, default and description of each argument then stand in one place, which
type checkers and editors read. `**options: Unpack[SomeTypedDict]` would need each name
and type a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import update_wrapper, wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from hocket.errors import ConfigError
from hocket.nearest import nearest

_Arguments = ParamSpec("_Arguments")
_Config = TypeVar("_Config")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self")


def takes_fields_of(
    config: Callable[_Arguments, _Config],
) -> Callable[[Callable[[_Config], _Result]], Callable[_Arguments, _Result]]:
    """Give a function of one configuration the configuration's fields as arguments.

    Args:
        config: the dataclass.

    Returns:
        A decorator. What it returns raises ConfigError for an unknown argument, and
        names the nearest known one.
    """
    known = signature(config).parameters

    def decorate(
        function: Callable[[_Config], _Result],
    ) -> Callable[_Arguments, _Result]:
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            _refuse(function.__name__, args, kwargs, known)
            return function(config(*args, **kwargs))

        update_wrapper(call, function)
        del call.__wrapped__  # type: ignore[attr-defined]  # it takes a configuration
        result = signature(function).return_annotation
        _set_signature(call, Signature([*known.values()], return_annotation=result))
        return call

    return decorate


def constructor_takes_fields_of(
    config: Callable[_Arguments, _Config], **advice: str
) -> Callable[
    [Callable[[_Self, _Config], None]], Callable[Concatenate[_Self, _Arguments], None]
]:
    """Do the same for an `__init__` of one configuration.

    Args:
        config: the dataclass.
        advice: what to say of arguments that users expect, and that it does not have.
    """
    known = signature(config).parameters

    def decorate(
        init: Callable[[_Self, _Config], None],
    ) -> Callable[Concatenate[_Self, _Arguments], None]:
        def construct(
            self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
        ) -> None:
            _refuse(type(self).__name__, args, kwargs, known, advice)
            init(self, config(*args, **kwargs))

        construct.__doc__ = config.__doc__  # which `help` shows
        own = Parameter("self", Parameter.POSITIONAL_ONLY)
        _set_signature(construct, Signature([own, *known.values()]))
        return construct

    return decorate


def names_its_arguments(**advice: str) -> Callable[[type[_Config]], type[_Config]]:
    """Let a dataclass refuse an argument that it does not have as functions do.

    Args:
        advice: as for `constructor_takes_fields_of`.
    """

    def decorate(config: type[_Config]) -> type[_Config]:
        known, init = signature(config).parameters, vars(config)["__init__"]

        @wraps(init)
        def construct(self: _Config, /, *args: object, **kwargs: object) -> None:
            _refuse(config.__name__, args, kwargs, known, advice)
            init(self, *args, **kwargs)

        config.__init__ = construct  # type: ignore[assignment, method-assign]
        return config

    return decorate


def values_of(options: type[Any], source: object) -> dict[str, Any]:
    """Return the values that an object has for the fields of a dataclass.

    Args:
        options: the dataclass.
        source: an object with an attribute for each field.
    """
    return {field.name: getattr(source, field.name) for field in fields(options)}


def _refuse(
    what: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    known: Mapping[str, Parameter],
    advice: Mapping[str, str] | None = None,
) -> None:
    for name in kwargs:
        if name not in known:
            near = (advice or {}).get(name) or nearest(name, known)
            raise ConfigError(f"{what} takes no argument {name!r}; {near}")
    try:
        Signature([*known.values()]).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None


def _set_signature(function: Callable[..., object], shown: Signature) -> None:
    function.__signature__ = shown  # type: ignore[attr-defined]


def function_fault(argument: str, value: object, example: str) -> str | None:
    """Return what is wrong with an argument that must be a function; or None.

    Args:
        argument: the argument's name, and what the function does.
        value: what was given.
        example: a function that would do.
    """
    if callable(value):
        return None
    kind = type(value).__name__
    return f"{argument}, such as `{example}`; got {kind} {value!r:.60}"
