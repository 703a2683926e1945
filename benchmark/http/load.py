# SPDX-License-Identifier: Apache-2.0
"""What the clients of a server ask and when, written as a trace that `vllm bench serve` replays. Reads no results."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


# The name under which every server offers the model.
SERVED_NAME = "benchmark"


@dataclass(frozen=True)
class Mix:
    """Lengths in tokens, as ranges to draw from, ends included. A prompt is long or short.

    New tokens differ, too: or else clients who once begin together stay together, and none decodes while others prefill.
    """

    long_share: float
    long_prompt: tuple[int, int]
    short_prompt: tuple[int, int]
    new_tokens: tuple[int, int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(*self.long_prompt, *self.short_prompt) + max(self.new_tokens)


@dataclass(frozen=True)
class Load:
    """How many requests come, and how fast.

    Attributes:
        rate: requests per second, in a Poisson process; None: each client sends its next one when its last is answered.
        clients: of a load without a rate.
    """

    requests: int
    rate: float | None = None
    clients: int = 1

    @property
    def name(self) -> str:
        return f"{self.clients} clients" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds from the start, and its lengths in tokens."""

    at: float
    prompt: int
    new_tokens: int


def draw_arrivals(load: Load, mix: Mix, seed: int) -> list[Arrival]:
    """The requests of a load: an exact share of long prompts, at random places."""
    random = np.random.default_rng(seed)
    is_long = np.arange(load.requests) < round(load.requests * mix.long_share)
    random.shuffle(is_long)
    gaps = np.zeros(load.requests) if load.rate is None else random.exponential(1 / load.rate, load.requests)
    times = np.cumsum(gaps) - gaps[0]
    arrivals = []
    for at, long_one in zip(times, is_long, strict=True):
        prompt = random.integers(*(mix.long_prompt if long_one else mix.short_prompt), endpoint=True)
        arrivals.append(Arrival(float(at), int(prompt), int(random.integers(*mix.new_tokens, endpoint=True))))
    return arrivals


def write_trace(arrivals: Sequence[Arrival], path: Path) -> None:
    """Writes requests for the dataset `timed_trace`. Each has a hash of its own: no two prompts share a block."""
    lines = [
        {"timestamp": one.at, "input_length": one.prompt, "output_length": one.new_tokens, "hash_ids": [number]}
        for number, one in enumerate(arrivals)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def bench_command(
    python: str, url: str, tokenizer: Path, load: Load, arrivals: Sequence[Arrival], trace: Path
) -> list[str]:
    """`vllm bench serve` on a trace; the result is written beside it."""
    command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", url]
    command += ["--model", SERVED_NAME, "--tokenizer", str(tokenizer), "--temperature", "0", "--disable-tqdm"]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", str(len(arrivals))]
    # One hash stands for a whole prompt.
    command += ["--timed-trace-chunk-hash-size", str(max(one.prompt for one in arrivals))]
    command += ["--save-result", "--save-detailed", "--result-dir", str(trace.parent)]
    command += ["--result-filename", result_path(trace).name]
    if load.rate is None:
        command += ["--no-self-timed", "--max-concurrency", str(load.clients)]
    return command


def result_path(trace: Path) -> Path:
    """Where the result of a trace is."""
    return trace.with_suffix(".json")


def bench(
    python: str, url: str, tokenizer: Path, load: Load, arrivals: Sequence[Arrival], trace: Path
) -> dict[str, Any]:
    """Lets `vllm bench serve` send the requests; returns its detailed result.

    Raises:
        RuntimeError: it failed.
    """
    write_trace(arrivals, trace)
    command = bench_command(python, url, tokenizer, load, arrivals, trace)
    # Prompts are drawn from Python's hash of their number: the same ones for every server.
    environment = os.environ | {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=trace.parent)
    if done.returncode or not result_path(trace).is_file():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"vllm bench serve failed with exit code {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(result_path(trace).read_text(encoding="utf-8"))
    return result
