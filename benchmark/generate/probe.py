# SPDX-License-Identifier: Apache-2.0
"""Loads an artifact in a fresh process, generates once, and prints seconds and bytes as one JSON line.

    python -m benchmark.generate.probe ARTIFACT PROMPT_LENGTH NEW_TOKENS

Peak memory is measured above what the imports take, and is to be read against weights + KV cache, which no runtime can
do without. The prompt should fill the cache: pages that nothing was written to take no memory.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch

from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.generate import NeuronModelForCausalLM

from ..systems import System


def main(path: str, prompt_length: int, new_tokens: int) -> None:
    """Prints what loading and one call of generate take."""
    imported = memory("VmRSS")
    start = time.perf_counter()
    model = NeuronModelForCausalLM.from_pretrained(path)
    load_seconds = time.perf_counter() - start
    loaded = memory("VmRSS")
    rows = model.neuron_config.batch_size
    prompts = torch.randint(0, model.artifact.model.vocab_size, (rows, prompt_length))
    System("probe", model).generate(prompts, new_tokens)
    peak = memory("VmHWM") - imported
    weights, cache = needed_bytes(model.artifact)
    print(
        json.dumps(
            {
                "load_s": load_seconds,
                "loaded_bytes": loaded - imported,
                "peak_bytes": peak,
                "weights_bytes": weights,
                "kv_cache_bytes": cache,
                "peak_to_needed": peak / (weights + cache),
            }
        )
    )


def needed_bytes(artifact: Artifact) -> tuple[int, int]:
    """Bytes of the weights and of the KV cache, from the manifest."""
    weights = artifact.manifest["files"][WEIGHTS_NAME]["size"]
    cache = sum(math.prod(state.shape) * getattr(torch, state.dtype).itemsize for state in artifact.states())
    return weights, cache


def memory(key: str) -> int:
    """This process's resident bytes, now (VmRSS) or at most (VmHWM); getrusage would count the parent's peak too."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
