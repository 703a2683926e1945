# SPDX-License-Identifier: Apache-2.0
"""Traces: the arrivals and lengths of requests, and the files with them. Errors name file and line. Needs no torch.

- own: JSON lines or CSV with `arrival` (seconds), `prompt_tokens`, `new_tokens` and, for prompts that start alike, `prefix` and
  `prefix_tokens`.
- Azure LLM inference traces (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake (github.com/kvcache-ai/Mooncake, FAST 25): JSON lines with timestamp (ms), input_length, output_length and hash_ids,
  each of which stands for a block of 512 tokens.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core import Request


# No model of a trace is known: ids below this are drawn where nothing computes with them.
VOCABULARY = 32_000
# A default sequence length is a multiple of this.
_LENGTH_STEP = 256
MOONCAKE_BLOCK = 512
# A prompt of a trace is made; a length that no model takes would only take memory.
LONGEST = 1 << 24
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")


class SharedPart(NamedTuple):
    """Tokens of a prompt that equal those of every other prompt with the same key in the same place."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace, with at least one token of a prompt and one new one."""

    arrival: float  # seconds from the first one
    prompt_tokens: int
    new_tokens: int
    shared: tuple[SharedPart, ...] = ()  # the beginning of its prompt, part by part; its other tokens are its own
    source: str = ""  # its place, as file:line

    @property
    def tokens(self) -> int:
        """Places of the cache that it takes: its last token is never fed back."""
        return self.prompt_tokens + self.new_tokens - 1


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order of their arrival, the first one at 0."""

    requests: tuple[TracedRequest, ...]
    name: str

    @classmethod
    def from_requests(cls, requests: Sequence[TracedRequest], name: str) -> RequestTrace:
        """Sort requests by their arrival; raise ValueError where there are none."""
        if not requests:
            raise ValueError(f"{name} holds no requests; give a line for each")
        ordered = sorted(requests, key=lambda request: request.arrival)
        return cls(tuple(replace(each, arrival=each.arrival - ordered[0].arrival) for each in ordered), name)

    @property
    def seconds(self) -> float:
        return self.requests[-1].arrival

    @property
    def shares_prefixes(self) -> bool:
        firsts = [request.shared[0].key for request in self.requests if request.shared]
        return len(set(firsts)) < len(firsts)

    @property
    def sequence_length(self) -> int:
        """The least multiple of 256 that holds every request."""
        longest = max(request.tokens for request in self.requests)
        return -(-longest // _LENGTH_STEP) * _LENGTH_STEP

    def check_length(self, sequence_length: int) -> None:
        """Raise ValueError with the first request that does not fit."""
        for request in self.requests:
            if request.tokens > sequence_length:
                raise ValueError(
                    f"{request.source}: {request.prompt_tokens} prompt tokens and {request.new_tokens} new ones do not fit "
                    f"--sequence-length {sequence_length}; raise it to {request.tokens} or more, or take the request out of the trace"
                )

    def draw_prompts(self, vocab_size: int = VOCABULARY, seed: int = 0) -> list[np.ndarray]:
        """Return token ids of each prompt, int32: random but for shared parts, and the same for every server."""
        prompts = []
        for number, request in enumerate(self.requests):
            own = request.prompt_tokens - sum(part.tokens for part in request.shared)
            parts = []
            for key, count in [*((f"shared/{key}", tokens) for key, tokens in request.shared), (f"own/{number}", own)]:
                digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
                random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
                parts.append(random.integers(0, vocab_size, count).astype(np.int32))
            prompts.append(np.concatenate(parts))
        return prompts


def traced_request(trace: RequestTrace, prompts: Sequence[np.ndarray], number: int) -> Request:
    """Return one request of a trace for an engine; its id is its number."""
    new_tokens = trace.requests[number].new_tokens
    return Request(request_id=str(number), prompt_token_ids=prompts[number], max_new_tokens=new_tokens)


def read_trace(path: Path) -> RequestTrace:
    """Read a trace, of the format that the field names of its first line decide; raise ValueError with file, line and remedy."""
    requests = []
    parse: Callable[[_TraceLine], TracedRequest] | None = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for line in _read_lines(file, path):
                parse = parse or _find_format(line)
                requests.append(parse(line))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}; give JSON lines or CSV") from None
    return RequestTrace.from_requests(requests, str(path))


class _TraceLine(NamedTuple):
    """The fields of one line, and its place as file:line."""

    fields: dict[str, Any]
    where: str

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


def _find_format(line: _TraceLine) -> Callable[[_TraceLine], TracedRequest]:
    for names, parse in FORMATS.items():
        if set(names) <= line.fields.keys():
            return parse
    known = "; ".join(", ".join(names) for names in FORMATS)
    found = ", ".join(line.fields)[:200] or "(none)"
    raise ValueError(f"{line.where}: no known trace has the fields {found}; give one of: {known}")


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
            try:
                fields = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(
                    f"{where}: {text[:60]!r} is not JSON ({error}); give one object in each line"
                ) from None
            if not isinstance(fields, dict):
                raise ValueError(f"{where}: {text[:60]!r} is no JSON object; give one in each line")
            yield _TraceLine(fields, where)
        elif header is None:
            header = [name.strip() for name in next(csv.reader([text]))]
        else:
            yield _TraceLine(_parse_row(header, text, where), where)


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
