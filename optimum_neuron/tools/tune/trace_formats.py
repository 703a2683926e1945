# SPDX-License-Identifier: Apache-2.0
"""Files with traces: this project's own, JSON lines or CSV, and published ones. Errors name file and line.

- own: `arrival` (seconds), `prompt_tokens`, `new_tokens` and, for prompts that start alike, `prefix` and `prefix_tokens`.
- Azure LLM inference traces (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake (github.com/kvcache-ai/Mooncake, FAST 25): JSON lines with timestamp (ms), input_length, output_length and hash_ids,
  each of which stands for a block of 512 tokens.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from .trace import RequestTrace, SharedPart, TracedRequest


MOONCAKE_BLOCK = 512
# A prompt of a trace is made; a length that no model takes would only take memory.
LONGEST = 1 << 24
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")


def read_trace(path: Path) -> RequestTrace:
    """Read a trace; the field names of its first line decide the format.

    Raises:
        ValueError: a line is malformed, or there is none; the message has file, line, value and remedy.
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
    """
    requests = []
    parse: Callable[[_TraceLine], TracedRequest] | None = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for line in _read_lines(file, path):
                parse = parse or line.find_format()
                requests.append(parse(line))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}; give JSON lines or CSV") from None
    return RequestTrace.from_requests(requests, str(path))


class _TraceLine:
    """The fields of one line, and its place as file:line."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def find_format(self) -> Callable[[_TraceLine], TracedRequest]:
        for names, parse in FORMATS.items():
            if set(names) <= self.fields.keys():
                return parse
        known = "; ".join(", ".join(names) for names in FORMATS)
        found = ", ".join(self.fields)[:200] or "(none)"
        raise ValueError(f"{self.where}: the fields {found} are of no known trace; give one of: {known}")

    def read_number(self, name: str) -> float:
        value = self.fields.get(name)
        if value is None or value == "":
            raise ValueError(f"{self.where}: {name} is missing; give a number")
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise ValueError(f"{self.where}: {name} {str(value)[:60]!r} is no number; correct it")
        return found

    def read_time(self, name: str) -> float:
        found = self.read_number(name)
        if found < 0:
            raise ValueError(f"{self.where}: {name} {found:g} is negative; count from the first request")
        return found

    def read_count(self, name: str) -> int:
        found = self.read_number(name)
        if not (found.is_integer() and 1 <= found <= LONGEST):
            raise ValueError(
                f"{self.where}: {name} {found:g} is no whole number from 1 to {LONGEST:,}; correct it or leave the line out"
            )
        return int(found)


def _read_lines(file: Any, path: Path) -> Iterator[_TraceLine]:
    """Yield each line that is not empty; JSON where the first one begins with a brace."""
    header: list[str] | None = None
    for number, line in enumerate(file, 1):
        text, where = line.strip(), f"{path}:{number}"
        if not text:
            continue
        if header is None and text.startswith(("{", "[")):
            header = []
        if header == []:
            yield _TraceLine(_parse_json(text, where), where)
        elif header is None:
            header = [name.strip() for name in next(csv.reader([text]))]
        else:
            yield _TraceLine(_parse_row(header, text, where), where)


def _parse_json(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {text[:60]!r} is not JSON ({error}); give one object in each line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {text[:60]!r} is no JSON object; give one in each line")
    return fields


def _parse_row(header: list[str], text: str, where: str) -> dict[str, Any]:
    try:
        values = next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"{where}: {text[:60]!r} is no line of CSV ({error}); correct it") from None
    if len(values) != len(header):
        raise ValueError(
            f"{where}: {text[:60]!r} has {len(values)} values for the {len(header)} columns {', '.join(header)[:200]}; give each one"
        )
    return {name: value.strip() for name, value in zip(header, values, strict=True)}


def _parse_own(line: _TraceLine) -> TracedRequest:
    prompt = line.read_count("prompt_tokens")
    shared: tuple[SharedPart, ...] = ()
    if line.fields.get("prefix") not in (None, ""):
        tokens = line.read_count("prefix_tokens")
        if tokens > prompt:
            raise ValueError(f"{line.where}: prefix_tokens {tokens} of a prompt of {prompt} tokens; lower it")
        shared = (SharedPart(str(line.fields["prefix"]), tokens),)
    return TracedRequest(line.read_time("arrival"), prompt, line.read_count("new_tokens"), shared, line.where)


def _parse_azure(line: _TraceLine) -> TracedRequest:
    text = str(line.fields["TIMESTAMP"])
    found = _TIMESTAMP.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        day, time, fraction, zone = found.groups()
        moment = datetime.fromisoformat(f"{day}T{time}{'+00:00' if zone in (None, 'Z') else zone}")
    except ValueError:
        raise ValueError(f"{line.where}: TIMESTAMP {text!r} is no time; give it as 2023-11-16 18:15:46.680") from None
    arrival = (moment - _EPOCH) / timedelta(seconds=1) + float(fraction or 0)
    prompt, new = line.read_count("ContextTokens"), line.read_count("GeneratedTokens")
    return TracedRequest(arrival, prompt, new, (), line.where)


def _parse_mooncake(line: _TraceLine) -> TracedRequest:
    prompt = line.read_count("input_length")
    ids = line.fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(each, int | str) for each in ids):
        raise ValueError(f"{line.where}: hash_ids {str(ids)[:60]} is no list of ids; give one, or leave it out")
    blocks = -(-prompt // MOONCAKE_BLOCK)
    if ids and len(ids) != blocks:
        raise ValueError(
            f"{line.where}: {len(ids)} hash_ids for an input_length of {prompt}; it has {blocks} blocks of {MOONCAKE_BLOCK} tokens"
        )
    parts = tuple(
        SharedPart(str(each), min(MOONCAKE_BLOCK, prompt - place * MOONCAKE_BLOCK)) for place, each in enumerate(ids)
    )
    arrival = line.read_time("timestamp") / 1000
    return TracedRequest(arrival, prompt, line.read_count("output_length"), parts, line.where)


FORMATS: dict[tuple[str, ...], Callable[[_TraceLine], TracedRequest]] = {
    ("arrival", "prompt_tokens", "new_tokens"): _parse_own,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _parse_azure,
    ("timestamp", "input_length", "output_length"): _parse_mooncake,
}
