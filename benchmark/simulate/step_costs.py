# SPDX-License-Identifier: Apache-2.0
"""What steps cost on a device: a few parts, fitted to measured times. Knows no scheduler and no requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from optimum_neuron.graphs.spec import GraphSpec
from optimum_neuron.targets.neuron.sdk.published_runs import LLAMA_8B_INF2, PublishedRun


# What both kinds of steps of the published run take for the pass over the weights, as far as one can tell.
_WEIGHTS_MS = 20.0


def _token_ms(run: PublishedRun) -> float:
    assert run.first_token_ms is not None and run.prompt_tokens is not None  # it measured chunks
    return (run.first_token_ms / run.chunks - _WEIGHTS_MS) / run.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Milliseconds of a step's parts: `weights + batch_size * row + chunk tokens * token + mixed + launch`.

    The defaults fit Llama-3.1-8B on 8 cores of an inf2.48xlarge (tensor parallel 8, batch size 32, sequence length
    4096). Published by optimum-neuron's benchmark of chunked prefill (pull request 1086): a decode step of 24.6 ms, and
    296 ms for the 2 chunks of 1024 tokens of a 1500-token prompt. Inferred: that 20 ms of either are the pass over the
    weights, that the rest grows with rows and tokens, and that a mixed step takes 3 ms beyond its parts.

    Attributes:
        weights_ms: what every step takes, whatever its size.
        row_ms: per decode row of the graph, idle ones included.
        token_ms: per prompt token of the graph, padding included.
        mixed_ms: what a step that decodes and takes in prompts takes beyond both.
        launch_ms: per step, spent on the host.
        attention_ms: per 1024 prompt tokens of the graph and 1024 columns of its context beyond `context_length`, and
            as much less below it.
        context_length: columns of the graph that `token_ms` was measured with.
        source: who measured.
    """

    weights_ms: float = _WEIGHTS_MS
    row_ms: float = (LLAMA_8B_INF2.decode_ms - _WEIGHTS_MS) / LLAMA_8B_INF2.batch_size
    token_ms: float = _token_ms(LLAMA_8B_INF2)
    mixed_ms: float = 3.0
    launch_ms: float = 0.0
    attention_ms: float = 0.0
    context_length: int = 4096
    source: str = "Llama-3.1-8B, inf2.48xlarge, TP8, published by optimum-neuron PR 1086"

    def seconds(self, graph: GraphSpec) -> float:
        """Of a step: those of its graph, however few of the graph's rows and tokens are in use."""
        total = self.weights_ms + self.launch_ms
        if graph.has_decode:
            total += graph.batch_size * self.row_ms
        if graph.has_chunk:
            beyond = (graph.context_length - self.context_length) / 1024
            token_ms = max(0.0, self.token_ms + self.attention_ms / 1024 * beyond)
            total += graph.ctx_batch_size * graph.chunk_size * token_ms
        return (total + (self.mixed_ms if graph.kind == "mixed" else 0.0)) / 1000

    @classmethod
    def from_times(cls, decode_ms: float, rows: int, chunk_ms: float, tokens: int, source: str) -> Calibration:
        """From a decode step of `rows` and a chunk step of `tokens`; the shares of weights and mixing are the default's.

        Raises:
            ValueError: the chunk step takes less than the pass over the weights alone.
        """
        known = cls()
        decode = known.weights_ms + 32 * known.row_ms
        weights = decode_ms * known.weights_ms / decode
        if chunk_ms <= weights:
            raise ValueError(
                f"a chunk step of {chunk_ms:g} ms is no longer than the {weights:.1f} ms that reading the weights takes of a "
                f"decode step of {decode_ms:g} ms; check both times"
            )
        return cls(
            weights_ms=weights,
            row_ms=(decode_ms - weights) / rows,
            token_ms=(chunk_ms - weights) / tokens,
            mixed_ms=decode_ms * known.mixed_ms / decode,
            source=source,
        )

    @classmethod
    def from_file(cls, path: Path) -> Calibration:
        """From a JSON object with these attributes, or with `steps`: measured times as `_fit` takes them.

        Raises:
            ValueError: the file holds neither.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if isinstance(data, dict) and "steps" in data:
            data = _fit(data["steps"], path)
        names = {entry.name for entry in fields(cls)}
        if not isinstance(data, dict) or not {"weights_ms", "row_ms", "token_ms"} <= set(data) <= names:
            raise ValueError(
                f"{path} must hold an object with 'steps', or with weights_ms, row_ms, token_ms and, if need be, others of "
                f"{sorted(names)}"
            )
        wrong = [key for key, value in data.items() if key != "source" and not _is_time(value)]
        if wrong:
            raise ValueError(f"{path} has {wrong[0]}={data[wrong[0]]!r}; give a number of at least 0")
        return cls(**{"source": str(path), **data})


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _fit(steps: list[dict[str, Any]], path: Path) -> dict[str, float]:
    """Least squares, relative, of objects with kind, batch_size, ctx_batch_size (1 if left out), chunk_size and ms."""
    try:
        kinds = [step["kind"] for step in steps]
        rows = [0 if step["kind"] == "chunked_prefill" else step["batch_size"] for step in steps]
        chunks = [step.get("ctx_batch_size", 1) * step.get("chunk_size", 0) for step in steps]
        times = np.array([step["ms"] for step in steps], float)
        parts = np.array([np.ones(len(steps)), rows, chunks, [kind == "mixed" for kind in kinds]], float).T
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path}: each of 'steps' needs kind, batch_size, ctx_batch_size, chunk_size and ms"
        ) from None
    if not parts.size or (times <= 0).any() or np.linalg.matrix_rank(parts) < parts.shape[1]:
        raise ValueError(
            f"{path}: {len(steps)} steps do not tell weights, rows, tokens and mixing apart; give times above 0 of "
            f"token_generation, mixed, and chunked_prefill at two chunk sizes"
        )
    fitted = np.linalg.lstsq(parts / times[:, None], np.ones(len(times)), rcond=None)[0]
    # A part that is too small to measure may come out below 0.
    names = ("weights_ms", "row_ms", "token_ms", "mixed_ms")
    return dict(zip(names, np.maximum(fitted, 0.0).tolist(), strict=True))
