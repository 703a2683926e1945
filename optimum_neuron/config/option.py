# SPDX-License-Identifier: Apache-2.0
"""Options declared once, as dataclass fields: documentation, command lines and checks of names derive from the declaration."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar


# Ways of a command line to take several values: one flag for each, words after the flag, or sizes separated by commas too.
REPEATED, WORDS, SIZES = "repeated", "words", "sizes"
# Graphs count positions and tokens in int32.
LARGEST_SIZE = 2**31 - 1
_DTYPE_SPELLINGS = {"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"}
_Class = TypeVar("_Class")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Options = TypeVar("_Options", bound="Options")


@dataclass(frozen=True)
class OptionSpec:
    """The declaration of an option.

    Attributes:
        help: one text for Python and the command line; names of options stand in backticks.
        group: the group of the command line's help; empty for an option that only Python has.
        parse: makes a value of a word of the command line; int stands for a whole number of `span`.
        many: REPEATED, WORDS or SIZES of an option with several values.
        is_switch: the flag takes no value and sets true.
        off: the help of a switch that is on by default: its flag begins with --no- and sets false.
    """

    name: str
    default: Any
    help: str
    group: str = ""
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    parse: Callable[[str], Any] = str
    many: str = ""
    is_switch: bool = False
    off: str = ""
    span: tuple[int, int] = (1, LARGEST_SIZE)
    takes_none: bool = False

    @property
    def flag(self) -> str:
        return ("--no-" if self.off else "--") + self.name.replace("_", "-")

    def command_words(self, value: Any) -> Iterator[str]:
        """Yield the words of a command line that give the option a value, which is not None."""
        values = value if isinstance(value, list | tuple) else [value]
        if self.is_switch:
            yield from [self.flag] if bool(value) != bool(self.off) else []
        elif self.many == REPEATED:
            for each in values:
                yield from (self.flag, str(each))
        elif self.many == WORDS:
            yield from (self.flag, *values)
        else:
            yield from (self.flag, ",".join(map(str, values)))


def option(default: Any, help: str, group: str = "", **settings: Any) -> Any:
    """Return a dataclass field that declares an option; `settings` are attributes of `Option`."""
    return field(default=default, metadata={"help": help, "group": group, **settings})


class Options:
    """A base of dataclasses with fields that `option` makes."""

    @classmethod
    @cache
    def declared(cls) -> dict[str, OptionSpec]:
        """Return the declaration of each option by its name."""
        return {
            each.name: OptionSpec(
                each.name, each.default, **each.metadata, takes_none=each.default is None or "None" in str(each.type)
            )
            for each in fields(cls)  # type: ignore[arg-type]
        }

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[_Options], options: Mapping[str, Any]) -> _Options:
        """Return the options of these names.

        Raises:
            TypeError: an option has an unknown name, or a value of the wrong type.
            ValueError: a value is out of range, or two contradict each other.
        """
        refuse_unknown(options, cls.option_names())
        return cls(**options)


def documented(cls: type[_Class]) -> type[_Class]:
    """Append the declared options to a class's docstring, as its arguments."""
    lines = (f"{name}: {each.help}" for name, each in cls.declared().items())  # type: ignore[attr-defined]
    head, _, rest = (cls.__doc__ or "").partition("\n\n    Raises:")
    wrapped = "\n".join(textwrap.fill(line, 110, initial_indent=" " * 8, subsequent_indent=" " * 12) for line in lines)
    cls.__doc__ = f"{head}\n\n    Args:\n{wrapped}" + (f"\n\n    Raises:{rest}" if rest else "\n    ")
    return cls


def takes_options(*classes: type[Options]) -> Callable[[_Function], _Function]:
    """Return a decorator that lists the options of classes, which a function takes as `**options`, in its signature."""

    def list_options(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        listed = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for cls in classes
            for each in fields(cls)  # type: ignore[arg-type]
        ]
        function.__signature__ = signature.replace(parameters=[*own, *listed, rest])  # type: ignore[attr-defined]
        return function

    return list_options


def refuse_unknown(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError where an option has none of the known names; the message suggests the nearest one."""
    names = tuple(known)
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(names)}"
            raise TypeError(f"unknown option {name!r} = {value!r}; {hint}")


def read_dtype(value: object) -> Any:
    """Return torch's name of a type: "bfloat16" for torch.bfloat16, "torch.bfloat16", "bf16" or "BF16"; else the value itself."""
    if not isinstance(value, str) and type(value).__name__ != "dtype":
        return value
    name = str(value).lower().removeprefix("torch.")
    return _DTYPE_SPELLINGS.get(name, name)
