# SPDX-License-Identifier: Apache-2.0
"""What is measured of a model in one precision, and what is read from it: medians, and shares of the machine's limits."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..machine import Limits


LOAD, FIRST_TOKEN, PEAK = "load, s", "first token from a cold start, s", "peak memory, MB"
CONVERSION = "export or conversion, s"
# How precision is counted: bits of a weight, and bytes of a number in the KV cache.
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "int4": 2}
DECODE_CONTEXT, DECODE_STEPS = 256, 24
SERVED_PROMPTS, SERVED_NEW_TOKENS = (16, 384), (16, 64)
COLD_PROMPT = 128

Request = tuple[list[int], int]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: "prefill", "decode" or "serve".
        rows: prompts, or requests.
        prompt: tokens of each prompt; 0 where lengths are mixed.
        new_tokens: of each row; 0 where they are mixed.
    """

    kind: str
    rows: int
    prompt: int = 0
    new_tokens: int = 0

    @property
    def figure(self) -> str:
        """The name of what it gives."""
        if self.kind == "prefill":
            return f"prefill {self.prompt:,}, tok/s"
        return f"decode x {self.rows}, ms/step" if self.kind == "decode" else f"{self.rows} requests, new tok/s"

    def value(self, answer: dict[str, float]) -> float:
        """Return the figure, from a worker's answer."""
        if self.kind == "prefill":
            return self.rows * self.prompt / answer["first_s"]
        if self.kind == "decode":
            return 1e3 * answer["rest_s"] / (self.new_tokens - 1)
        return answer["tokens"] / answer["seconds"]


def cases(prompts: Sequence[int], batches: Sequence[int], requests: Sequence[int]) -> list[Case]:
    """Return all cases of a run."""
    prefill = [Case("prefill", 1, prompt, 1) for prompt in prompts]
    decode = [Case("decode", rows, DECODE_CONTEXT - DECODE_STEPS, DECODE_STEPS) for rows in batches]
    return [*prefill, *decode, *(Case("serve", count) for count in requests)]


def longest_row(prompts: Sequence[int], batches: Sequence[int]) -> int:
    """Return tokens that a row of any case can have, with what rows that begin early are ahead of others, in whole blocks of 256."""
    served = SERVED_PROMPTS[1] + SERVED_NEW_TOKENS[1]
    longest = max(max(prompts) + 1, COLD_PROMPT + 1, DECODE_CONTEXT + 2 * max(batches), served)
    return -(-longest // 256) * 256


@dataclass(frozen=True)
class Prompts:
    """Random token ids: the same for all peers in a round of a case, and never the same again."""

    vocab_size: int

    def rows(self, case: Case, when: object) -> list[list[int]]:
        source = random.Random(f"{when} {case}")
        return [self._draw(source, case.prompt) for _ in range(case.rows)]

    def requests(self, case: Case, when: object) -> list[Request]:
        source = random.Random(f"{when} {case}")
        lengths = [(source.randint(*SERVED_PROMPTS), source.randint(*SERVED_NEW_TOKENS)) for _ in range(case.rows)]
        return [(self._draw(source, prompt), new_tokens) for prompt, new_tokens in lengths]

    def _draw(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(self.vocab_size) for _ in range(length)]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_weights: int
    head_weights: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: Path) -> Shape:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, heads, kv_heads = (config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        dim, layers, vocab_size = config["head_dim"], config["num_hidden_layers"], config["vocab_size"]
        layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
        return cls(layers, heads, kv_heads, dim, layers * layer, hidden * vocab_size, vocab_size)

    @property
    def weights(self) -> int:
        return self.linear_weights + self.head_weights

    def least_seconds(self, case: Case, precision: str, limits: Limits, read: float) -> float:
        """Return what reading or computing a prompt or step takes at least, whoever computes it.

        Each weight is read once, and the cache. No type computes faster than bfloat16 here.
        """
        size, width = self.weights * WEIGHT_BITS[precision] / 8, self.layers * self.heads * self.head_dim
        if case.kind == "prefill":  # the last token alone goes through the head
            operations: float = (
                2 * (self.linear_weights * case.prompt + self.head_weights) + 2 * width * case.prompt**2
            )
        else:
            columns = case.rows * (case.prompt + case.new_tokens / 2)
            size += columns * self.layers * self.kv_heads * self.head_dim * 2 * CACHE_BYTES[precision]
            operations = 2 * case.rows * self.weights + 4 * width * columns
        rate = limits.products["float32" if precision == "float32" else "bfloat16"]
        return max(size / read, operations / rate)


@dataclass
class Group:
    """A model in one precision.

    Attributes:
        values: by figure and peer, one of each round, and the rate at which memory was read right before it, where that was measured:
            others who use the machine take a share of it that changes from minute to minute.
        agreement: share of greedy tokens that are the reference's up to the first other one, by peer.
        reasons: by peer, why figures are missing.
        versions: by peer.
    """

    model: str
    precision: str
    cases: Sequence[Case]
    values: dict[str, dict[str, list[tuple[float, float | None]]]] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, figure: str, peer: str, value: float, read: float | None = None) -> None:
        self.values.setdefault(figure, {}).setdefault(peer, []).append((value, read))

    def explain(self, peer: str, reason: str) -> None:
        """Note a reason once."""
        reasons = self.reasons.setdefault(peer, [])
        if reason not in reasons:
            reasons.append(reason)

    def share(self, figure: str, peer: str, limits: Limits, shape: Shape) -> float | None:
        """Return the least time that the machine could take over the time that the peer took, the median of rounds, where there is one."""
        case = next((case for case in self.cases if case.figure == figure), None)
        if case is None or case.kind == "serve":
            return None
        shares = []
        for value, read in self.values[figure][peer]:
            seconds = value / 1e3 if case.kind == "decode" else case.prompt / value
            shares.append(shape.least_seconds(case, self.precision, limits, read or limits.read) / seconds)
        return statistics.median(shares)

    def to_dict(self, limits: Limits, shape: Shape) -> dict[str, Any]:
        """Return the JSON, cases first."""
        order = [*(case.figure for case in self.cases), FIRST_TOKEN, LOAD, CONVERSION, PEAK]
        figures: dict[str, dict[str, dict[str, float | None]]] = {}
        for figure in order:
            for peer, found in self.values.get(figure, {}).items():
                values = [value for value, _ in found]
                median, share = statistics.median(values), self.share(figure, peer, limits, shape)
                record = {"median": median, "min": min(values), "max": max(values), "share": share}
                figures.setdefault(figure, {})[peer] = record
        kept = {name: getattr(self, name) for name in ("model", "precision", "agreement", "reasons", "versions")}
        return {**kept, "figures": figures}


def agreed(reference: list[list[int]], tokens: list[list[int]]) -> float:
    """Return the share of tokens before the first that is another, over all rows: after it, texts have nothing in common."""
    equal = sum(
        next((place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
        for first, second in zip(reference, tokens, strict=True)
    )
    return equal / sum(map(len, reference))
