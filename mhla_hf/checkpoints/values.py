"""Dataclasses that validate settings from arguments or YAML files, with uniform error messages."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub.dataclasses import type_validator

MISSING: Any = dataclasses.MISSING
Number = int | float
T = TypeVar("T")


def checked_field(is_valid: Callable[[Any], bool], expected: str, default: Any = MISSING) -> Any:
    """Declare a dataclass field whose value is None or satisfies `is_valid`; errors describe valid values by `expected`."""
    return dataclasses.field(default=default, metadata={"check": (is_valid, expected)})


def at_least(minimum: int, default: Any = MISSING) -> Any:
    return checked_field(lambda value: value >= minimum, f"a whole number of at least {minimum}", default)


def number_in(low: float, high: float, expected: str) -> Callable[..., Any]:
    return functools.partial(checked_field, lambda value: low <= value <= high, expected)


# Without `number_in`: its `low` would be the smallest float above 0, which is 0 where denormal numbers are flushed.
positive = functools.partial(checked_field, lambda value: 0 < value < math.inf, "a number above 0")
not_negative = number_in(0, math.nextafter(math.inf, 0), "a number of at least 0")
fraction = number_in(0, 1, "a number from 0 to 1")
fraction_below_one = number_in(0, math.nextafter(1, 0), "a number of at least 0 and below 1")


def check_fields(instance: Any) -> None:
    """Raise ValueError, `field: got X, expected Y.`, for the first field of a dataclass with an invalid value."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        is_valid, expected = field.metadata.get("check", (lambda value: True, ""))
        try:
            type_validator(field.name, value, field.type)
        except TypeError:
            is_valid, expected = (lambda value: False), _describe_type(field.type)
        if value is not None and not is_valid(value):
            raise ValueError(f"{field.name}: got {value!r}, expected {expected}.")


@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def checked(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass that checks its fields before `__post_init__` and calls its `validate_*` methods after it."""
    finish = getattr(cls, "__post_init__", lambda self: None)

    def __post_init__(self: T) -> None:
        check_fields(self)
        finish(self)
        for name in dir(self):
            if name.startswith("validate_"):
                getattr(self, name)()

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclasses.dataclass(cls)


def read_settings(cls: type[T], values: Any, prefix: str = "settings: ") -> T:
    """Create an instance of a `checked` dataclass from a dict of its fields; errors begin with `prefix`."""
    if not isinstance(values, dict):
        raise ValueError(f"{prefix}got {values!r:.80}, expected a mapping.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in fields]:
        raise ValueError(f"{prefix}{unknown[0]}: got an unknown name, expected one of {', '.join(fields)}.")
    for name, field in fields.items():
        if field.default is field.default_factory is MISSING and name not in values:
            raise ValueError(f"{prefix}{name}: got nothing, expected a value.")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{prefix}{error}") from None


def _describe_type(annotation: Any) -> str:
    """Describe a type annotation for an error, such as `int | None` or `one of ['a', 'b']`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return f"one of {list(typing.get_args(annotation))}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_describe_type, typing.get_args(annotation))).replace("NoneType", "None")
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
