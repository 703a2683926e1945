# SPDX-License-Identifier: Apache-2.0
"""Members of a JSON object, read with types and ranges told. null is the same as a member that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from .errors import ApiError


_SHOWN = Repr()
_SHOWN.maxstring, _SHOWN.maxlist, _SHOWN.maxdict = 60, 4, 3


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    return _SHOWN.repr(value)


class Fields:
    """The members of an object; `rest` has those that nobody asked for.

    Raises:
        ApiError: from each method, where a member has another type or lies outside of its range.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.rest = {name: value for name, value in data.items() if value is not None}

    def any(self, name: str) -> Any:
        """A member as it is; None where it is not there."""
        return self.rest.pop(name, None)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number; 3.0 is one in JSON."""
        value = self.any(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            raise wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A finite number."""
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether it is true; `default` where it is not there."""
        value = self.rest.pop(name, default)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string that can be written as UTF-8."""
        value = self.any(name)
        return None if value is None else check_text(name, value)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """A string or a list of them, none of them empty; None where it is not there."""
        value = self.any(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(each, str) for each in values):
            raise wrong(name, value, f"a string or a list of up to {most} strings")
        for each in values:
            if not 1 <= len(check_text(name, each)) <= longest:
                raise wrong(name, each, f"strings of 1 to {longest} characters")
        return tuple(values)


def wrong(name: str, value: object, wanted: str) -> ApiError:
    """The refusal of a member's value."""
    return ApiError(f"{name} is {shown(value)}; give {wanted}, or leave it out", param=name)


def check_text(name: str, value: object) -> str:
    """A string as it is.

    Raises:
        ApiError: it is none, or it has half of a surrogate pair, which no tokenizer takes.
    """
    if not isinstance(value, str):
        raise ApiError(f"{name} is {shown(value)}; give a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = f"{name} has half of a surrogate pair at character {error.start}"
        raise ApiError(f"{at}; send characters beyond U+FFFF whole", param=name) from None
    return value


def check_token_id(name: str, value: object, size: int) -> int:
    """A token id as it is.

    Raises:
        ApiError: it is no whole number from 0 to `size - 1`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ApiError(
            f"{name} has the token id {shown(value)}, and the model's are 0 to {size - 1}; take ids from its own tokenizer",
            param=name,
        )
    return value
