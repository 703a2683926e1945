# SPDX-License-Identifier: Apache-2.0
"""Files with traces: this project's own, JSON lines or CSV, and what is published by others. Names file and line of what is wrong.

- own: `arrival` (seconds), `prompt_tokens`, `new_tokens` and, of prompts that start alike, `prefix` and `prefix_tokens`.
- Azure LLM inference traces (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake (github.com/kvcache-ai/Mooncake, FAST 25): JSON lines with timestamp (ms), input_length, output_length and hash_ids, of
  which each stands for a block of 512 tokens.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from .trace import SharedPart, Trace, TracedRequest


MOONCAKE_BLOCK = 512
# A prompt of a trace is made; a length that no model takes would only take memory.
LONGEST = 1 << 24
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")

Fields = Mapping[str, Any]


def read_trace(path: Path) -> Trace:
    """Reads a trace; its format is told by the names of the first line's fields.

    Raises:
        ValueError: a line is malformed, or there is none; the message has file, line, value and remedy.
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
    """
    requests = []
    parse: Callable[[Fields, str], TracedRequest] | None = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, fields in _lines(file, path):
                where = f"{path}:{number}"
                parse = parse or _format_of(fields, where)
                requests.append(parse(fields, where))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}; give JSON lines or CSV") from None
    return Trace.of(requests, str(path))


def _lines(file: Any, path: Path) -> Iterator[tuple[int, Fields]]:
    """Fields of each line that is not empty, by the number of the line; JSON where the first one begins with a brace."""
    header: list[str] | None = None
    for number, line in enumerate(file, 1):
        text, where = line.strip(), f"{path}:{number}"
        if not text:
            continue
        if header is None and text.startswith(("{", "[")):
            header = []
        if header == []:
            yield number, _json(text, where)
        elif header is None:
            header = [name.strip() for name in next(csv.reader([text]))]
        else:
            yield number, _row(header, text, where)


def _json(text: str, where: str) -> Fields:
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {text[:60]!r} is not JSON ({error}); give one object in each line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {text[:60]!r} is no JSON object; give one in each line")
    return fields


def _row(header: list[str], text: str, where: str) -> Fields:
    try:
        values = next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"{where}: {text[:60]!r} is no line of CSV ({error}); correct it") from None
    if len(values) != len(header):
        raise ValueError(
            f"{where}: {text[:60]!r} has {len(values)} values for the {len(header)} columns {', '.join(header)[:200]}; give each one"
        )
    return {name: value.strip() for name, value in zip(header, values, strict=True)}


def _format_of(fields: Fields, where: str) -> Callable[[Fields, str], TracedRequest]:
    for names, parse in FORMATS.items():
        if set(names) <= fields.keys():
            return parse
    known = "; ".join(", ".join(names) for names in FORMATS)
    raise ValueError(
        f"{where}: the fields {', '.join(fields)[:200] or '(none)'} are of no known trace; give one of: {known}"
    )


def _own(fields: Fields, where: str) -> TracedRequest:
    prompt = _count(fields, "prompt_tokens", where)
    shared: tuple[SharedPart, ...] = ()
    if fields.get("prefix") not in (None, ""):
        tokens = _count(fields, "prefix_tokens", where)
        if tokens > prompt:
            raise ValueError(f"{where}: prefix_tokens {tokens} of a prompt of {prompt} tokens; lower it")
        shared = (SharedPart(str(fields["prefix"]), tokens),)
    return TracedRequest(_time(fields, "arrival", where), prompt, _count(fields, "new_tokens", where), shared, where)


def _azure(fields: Fields, where: str) -> TracedRequest:
    text = str(fields["TIMESTAMP"])
    found = _TIMESTAMP.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        day, time, fraction, zone = found.groups()
        moment = datetime.fromisoformat(f"{day}T{time}{'+00:00' if zone in (None, 'Z') else zone}")
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP {text!r} is no time; give it as 2023-11-16 18:15:46.680") from None
    arrival = (moment - _EPOCH) / timedelta(seconds=1) + float(fraction or 0)
    return TracedRequest(
        arrival, _count(fields, "ContextTokens", where), _count(fields, "GeneratedTokens", where), (), where
    )


def _mooncake(fields: Fields, where: str) -> TracedRequest:
    prompt = _count(fields, "input_length", where)
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(each, int | str) for each in ids):
        raise ValueError(f"{where}: hash_ids {str(ids)[:60]} is no list of ids; give one, or leave it out")
    blocks = -(-prompt // MOONCAKE_BLOCK)
    if ids and len(ids) != blocks:
        raise ValueError(
            f"{where}: {len(ids)} hash_ids for an input_length of {prompt}; it has {blocks} blocks of {MOONCAKE_BLOCK} tokens"
        )
    parts = tuple(
        SharedPart(str(each), min(MOONCAKE_BLOCK, prompt - place * MOONCAKE_BLOCK)) for place, each in enumerate(ids)
    )
    arrival = _time(fields, "timestamp", where) / 1000
    return TracedRequest(arrival, prompt, _count(fields, "output_length", where), parts, where)


def _number(fields: Fields, name: str, where: str) -> float:
    value = fields.get(name)
    if value is None or value == "":
        raise ValueError(f"{where}: {name} is missing; give a number")
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{where}: {name} {str(value)[:60]!r} is no number; correct it")
    return found


def _time(fields: Fields, name: str, where: str) -> float:
    found = _number(fields, name, where)
    if found < 0:
        raise ValueError(f"{where}: {name} {found:g} is negative; count from the first request")
    return found


def _count(fields: Fields, name: str, where: str) -> int:
    found = _number(fields, name, where)
    if not (found.is_integer() and 1 <= found <= LONGEST):
        raise ValueError(
            f"{where}: {name} {found:g} is no whole number from 1 to {LONGEST:,}; correct it or leave the line out"
        )
    return int(found)


FORMATS: dict[tuple[str, ...], Callable[[Fields, str], TracedRequest]] = {
    ("arrival", "prompt_tokens", "new_tokens"): _own,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("timestamp", "input_length", "output_length"): _mooncake,
}
