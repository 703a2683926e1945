# SPDX-License-Identifier: Apache-2.0
"""The table of a result.json that came back. The file comes from a stranger: only checked values are shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.schema import choice, listed, named, number, read_object, record, text, whole
from ...cli import make_table
from ...targets.neuron.sdk.errors import explain_failure
from .modules import SHOWS


if TYPE_CHECKING:
    from rich.console import Console

_LINE = text()
_MODULE = record(
    {
        "sha256": text("[0-9a-f]{64}"),
        "outcome": choice(("compiled", "failed", "timeout")),
        "status": whole(-255, 255),
        "seconds": number(0),
        "peak_mib": whole(0),
        "neff_bytes": whole(0, 1 << 40),
        "instructions": listed(_LINE),
        "log": listed(_LINE),
    },
    closed=True,
)
_RESULT = record({"format": whole(1, 1), "compiler": _LINE, "host": _LINE, "modules": named(_MODULE)}, closed=True)


def read_result(path: Path) -> dict[str, Any]:
    """Return a checked result.json; raise ValueError where it is none, and OSError where it cannot be read."""
    try:
        result = read_object(path)
        _RESULT("the result", result)
        for name in result["modules"]:
            _LINE("a module's name", name)
    except ValueError as error:
        raise ValueError(f"{path} is no result of run_compiler.py: {error}") from error
    return result


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print a table of all modules, then why those failed that did, and the lines that count instructions."""
    from rich.text import Text

    modules: dict[str, dict[str, Any]] = result["modules"]
    table = make_table(
        f"{result['compiler']} on {result['host']}", ("module", "shows", "outcome"), ("s", "MiB", "NEFF MB")
    )
    for name, module in modules.items():
        outcome = f"failed ({module['status']})" if module["outcome"] == "failed" else module["outcome"]
        size = f"{module['neff_bytes'] / 1e6:,.1f}" if module["neff_bytes"] else "-"
        cells = (name, SHOWS.get(name, "a module of another version"), outcome)
        table.add_row(*map(Text, cells), f"{module['seconds']:,.0f}", f"{module['peak_mib']:,}", size)
    console.print(table)
    for name, module in modules.items():
        lines = module["instructions"]
        if module["outcome"] == "failed":
            lines = [explain_failure(module["status"], "\n".join(module["log"])), *lines]
        if lines:
            console.print(Text("\n".join((f"{name}:", *lines))))
    compiled = sum(module["outcome"] == "compiled" for module in modules.values())
    missing = sorted(SHOWS.keys() - modules.keys())
    rest = f"; not tried: {', '.join(missing)}" if missing else ""
    console.print(Text(f"{compiled} of {len(modules)} modules compile{rest}"))
