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
# Lengths in tokens, as ranges to draw from, ends included. New tokens differ, too: or else clients who once begin together stay
# together, and none decodes while others prefill.
LONG_SHARE, LONG_PROMPT, SHORT_PROMPT, NEW_TOKENS = 0.25, (1500, 2000), (50, 100), (32, 96)


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


def draw_requests(load: Load, seed: int) -> list[dict[str, Any]]:
    """Return the lines of a trace: an exact share of long prompts, at random places.

    Each has a hash of its own: no two prompts share a block.
    """
    random = np.random.default_rng(seed)
    is_long = np.arange(load.requests) < round(load.requests * LONG_SHARE)
    random.shuffle(is_long)
    gaps = np.zeros(load.requests) if load.rate is None else random.exponential(1 / load.rate, load.requests)
    return [
        {
            "timestamp": float(at),
            "input_length": int(random.integers(*(LONG_PROMPT if long_one else SHORT_PROMPT), endpoint=True)),
            "output_length": int(random.integers(*NEW_TOKENS, endpoint=True)),
            "hash_ids": [number],
        }
        for number, (at, long_one) in enumerate(zip(np.cumsum(gaps) - gaps[0], is_long, strict=True))
    ]


def bench_command(python: str, url: str, tokenizer: Path, load: Load, trace: Path) -> list[str]:
    """Return `vllm bench serve` on a trace; the result has the trace's name, as JSON."""
    command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", url]
    command += ["--model", SERVED_NAME, "--tokenizer", str(tokenizer), "--temperature", "0", "--disable-tqdm"]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", str(load.requests)]
    # One hash stands for a whole prompt.
    command += ["--timed-trace-chunk-hash-size", str(LONG_PROMPT[1])]
    command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99,100"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(trace.parent)]
    command += ["--result-filename", trace.with_suffix(".json").name]
    return command if load.rate else [*command, "--no-self-timed", "--max-concurrency", str(load.clients)]


def bench(
    python: str, url: str, tokenizer: Path, load: Load, requests: Sequence[dict[str, Any]], trace: Path
) -> dict[str, Any]:
    """Let `vllm bench serve` send the requests; return its detailed result, or raise RuntimeError where it failed."""
    trace.write_text("".join(json.dumps(line) + "\n" for line in requests), encoding="utf-8")
    # Prompts are drawn from Python's hash of their number: the same ones for every server.
    environment = os.environ | {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
    command = bench_command(python, url, tokenizer, load, trace)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=trace.parent)
    if done.returncode or not trace.with_suffix(".json").is_file():
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"vllm bench serve failed with exit code {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(trace.with_suffix(".json").read_text(encoding="utf-8"))
    return result
