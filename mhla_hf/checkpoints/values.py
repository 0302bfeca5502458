"""Values that people write, as arguments or in YAML: strict dataclasses, whose complaints are one sentence of one form."""

import dataclasses
import functools
import math
import re
import types
import typing

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

MISSING = dataclasses.MISSING
Number = int | float


def checked_field(right, expected, default=MISSING):
    """A field of a strict dataclass that is None, or for which right(value) is true; expected: what the error says."""

    def check(value):
        if value is not None and not right(value):
            raise ValueError(expected)

    return validated_field(check, default=default)


def at_least(least, default=MISSING):
    """A field that counts something, or is None."""
    return checked_field(lambda value: value >= least, f"a whole number of at least {least}", default)


def number_in(low, high, expected):
    """A maker of fields: numbers of at least `low` and at most `high`, both finite, or None."""
    return functools.partial(checked_field, lambda value: low <= value <= high, expected)


positive = number_in(math.ulp(0), math.nextafter(math.inf, 0), "a number above 0")
not_negative = number_in(0, math.nextafter(math.inf, 0), "a number of at least 0")
share = number_in(0, 1, "a number from 0 to 1")
decay = number_in(0, math.nextafter(1, 0), "a number of at least 0 and below 1")


def checked(cls):
    """The decorator of a strict dataclass that says what is wrong with it in one sentence, as a ValueError."""
    cls = strict(dataclasses.dataclass(cls))
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        try:
            make(self, *args, **kwargs)
        except (StrictDataclassFieldValidationError, StrictDataclassClassValidationError) as error:
            names = [field.name for field in dataclasses.fields(cls)]
            raise ValueError(_sentence(cls, error, dict(zip(names, args, strict=False)) | kwargs)) from None

    cls.__init__ = __init__
    return cls


def read_settings(cls, values, what="settings: "):
    """`values` by name as the strict dataclass `cls`; ValueError in one sentence that begins with `what`."""
    if not isinstance(values, dict):
        raise ValueError(f"{what}got {values!r:.80}; expected a mapping")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in values if name not in fields]:
        raise ValueError(f"{what}unknown {unknown[0]!r}; expected {', '.join(fields)}")
    for name, field in fields.items():
        if field.default is field.default_factory is MISSING and name not in values:
            raise ValueError(f"{what}{name} is missing")
    try:
        return cls(**values)
    except (StrictDataclassFieldValidationError, StrictDataclassClassValidationError) as error:
        raise ValueError(what + _sentence(cls, error, values)) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}{error}") from None


def _sentence(cls, error, values):
    if isinstance(error, StrictDataclassClassValidationError):
        return str(error.__cause__)
    name = re.match(r"Validation error for field '(\w+)'", str(error))[1]
    kind = next(field.type for field in dataclasses.fields(cls) if field.name == name)
    expected = error.__cause__ if isinstance(error.__cause__, ValueError) else _kind(kind)
    return f"{name} is {values[name]!r}; expected {expected}"


def _kind(kind):
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return f"one of {list(typing.get_args(kind))}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_kind, typing.get_args(kind))).replace("NoneType", "None")
    return kind.__name__ if isinstance(kind, type) else str(kind)
