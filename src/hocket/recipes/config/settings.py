"""What every section of a recipe is made of: kinds of values, and strictness."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hocket.core.layout import WorkerLayout
from hocket.errors import PlanError
from hocket.options import ScheduleOptions, UpdateOptions, faults_of, value_faults

Count = Annotated[int, Field(ge=1)]
NaturalNumber = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]

_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _is_function(name: str) -> str:
    if not _FUNCTION.fullmatch(name):
        raise ValueError(f"{name!r} should name a function, as 'module:function'")
    return name


FunctionName = Annotated[str, AfterValidator(_is_function)]


def _is_logger(name: str) -> str:
    if name != "tensorboard" and not _FUNCTION.fullmatch(name):
        raise ValueError(
            f"{name!r} should be 'tensorboard', or name a function that returns a "
            "logger, as 'module:function'"
        )
    return name


LoggerName = Annotated[str, AfterValidator(_is_logger)]


def _is_plain(value: Any) -> bool | int | float | str:
    is_plain = isinstance(value, bool | int | float | str)
    if not is_plain or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(
            f"{value!r:.80} should be a finite number, a truth or a string"
        )
    return value  # type: ignore[no-any-return]


Plain = Annotated[Any, AfterValidator(_is_plain)]


def layout_of(text: str) -> WorkerLayout:
    """Read a layout such as "4x2".

    Raises:
        ValueError: it is none; pydantic takes only this for a fault.
    """
    try:
        return WorkerLayout.parse(text)
    except PlanError as error:
        raise ValueError(str(error)) from None


class Settings(BaseModel):
    """A section: unknown keys are refused, and values are taken as they are written.

    Attributes:
        NEEDS: keys that have an effect only where one of others is said.
        ONE_OF: keys of which one may be said.
        NOT_ALL_0: keys of which at least one is above 0.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    ONE_OF: ClassVar[tuple[str, ...]] = ()
    NOT_ALL_0: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _value_is_valid(cls, value: Any, info: ValidationInfo) -> Any:
        """Check options one by one, so that all faults come at once."""
        is_option = issubclass(cls, UpdateOptions | ScheduleOptions)
        if is_option and (faults := [*value_faults(info.field_name or "", value)]):
            raise ValueError("\n".join(faults))
        return value

    @model_validator(mode="after")
    def _options_are_valid(self) -> Self:
        if faults := [*faults_of(self), *self._rule_faults()]:
            raise ValueError("\n".join(faults))
        return self

    def _rule_faults(self) -> Iterator[str]:
        for name, others in self.NEEDS.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and not any(getattr(self, other) for other in others):
                yield f"{name} {value!r} has no effect without {' or '.join(others)}"
        said = [x for x in self.ONE_OF if getattr(self, x)]
        if len(said) > 1:
            values = (f"{name} {getattr(self, name)!r}" for name in said)
            yield f"{' and '.join(values)}: say one of them (--set KEY= takes one away)"
        if self.NOT_ALL_0 and not any(getattr(self, x) for x in self.NOT_ALL_0):
            yield f"{' and '.join(self.NOT_ALL_0)} are 0: give one of them"


class FunctionSettings(Settings):
    """A function (`hocket.recipes.user_functions`); every other key is its argument.

    Args:
        function: `module:function`, in a module that is in the recipe's folder, or in
            `examples.zoo` of hocket's repository.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain]

    kind: Literal["function"]
    function: FunctionName

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that the function is called with."""
        return dict(self.__pydantic_extra__)
