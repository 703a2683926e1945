# SPDX-License-Identifier: Apache-2.0
"""Members of a JSON object, read with types and ranges. null is the same as a missing member."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from .errors import ApiError


_SHOWN = Repr()
_SHOWN.maxstring, _SHOWN.maxlist, _SHOWN.maxdict = 60, 4, 3


def shown_value(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    return _SHOWN.repr(value)


class Fields:
    """The members of an object; `rest` has those that were not read.

    Raises:
        ApiError: from each method, where a member has another type or lies outside of its range.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rest = {name: value for name, value in data.items() if value is not None}

    def take_any(self, name: str) -> Any:
        """Take a member as it is; None where it is missing."""
        return self.rest.pop(name, None)

    def take_whole(self, name: str, least: int, most: int) -> int | None:
        """Take a whole number; 3.0 is one in JSON."""
        value = self.take_any(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            raise wrong_value(name, value, f"a whole number from {least} to {most}")
        return value

    def take_number(self, name: str, least: float, most: float) -> float | None:
        """Take a finite number."""
        value = self.take_any(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise wrong_value(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def take_flag(self, name: str, default: bool = False) -> bool:
        """Take true or false; `default` where it is missing."""
        value = self.rest.pop(name, default)
        if not isinstance(value, bool):
            raise wrong_value(name, value, "true or false")
        return value

    def take_text(self, name: str) -> str | None:
        """Take a string that can be written as UTF-8."""
        value = self.take_any(name)
        return None if value is None else check_text(name, value)

    def take_texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """Take a string or a list of them, none of them empty; None where it is missing."""
        value = self.take_any(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(each, str) for each in values):
            raise wrong_value(name, value, f"a string or a list of up to {most} strings")
        for each in values:
            if not 1 <= len(check_text(name, each)) <= longest:
                raise wrong_value(name, each, f"strings of 1 to {longest} characters")
        return tuple(values)


def wrong_value(name: str, value: object, wanted: str) -> ApiError:
    """Return the refusal of a member's value."""
    return ApiError(f"{name} is {shown_value(value)}; give {wanted}, or leave it out", param=name)


def check_text(name: str, value: object) -> str:
    """Return a string; raise ApiError where it is none, or has half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str):
        raise ApiError(f"{name} is {shown_value(value)}; give a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = f"{name} has half of a surrogate pair at character {error.start}"
        raise ApiError(f"{at}; send characters beyond U+FFFF whole", param=name) from None
    return value


def check_token_id(name: str, value: object, size: int) -> int:
    """Return a token id; raise ApiError where it is no whole number from 0 to `size - 1`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ApiError(
            f"{name} has the token id {shown_value(value)}, and the model's are 0 to {size - 1}; take ids from its own tokenizer",
            param=name,
        )
    return value
