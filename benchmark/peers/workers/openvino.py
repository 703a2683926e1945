# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI's continuous batching, which its plain pipeline uses on a CPU as well."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from .protocol import Prompt, Sizes, run
from .stepping import SteppingRuntime


# its default group of 128 weights does not divide SmolLM2's 576
WEIGHTS = {"float32": ["fp32"], "bfloat16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "64"]}
# Unless asked otherwise, it keeps the cache in 8 bits and quantizes activations: like precision is asked for. int8 and int4 are its defaults.
EXACT: dict[str, Any] = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
PROPERTIES: dict[str, dict[str, Any]] = {
    "float32": EXACT | {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": EXACT | {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {},
    "int4": {},
}


class OpenVino(SteppingRuntime):
    """A pipeline, advanced step by step."""

    def __init__(self) -> None:
        self._requests = 0
        self._rows: list[tuple[Any, list[int]]] = []

    def versions(self) -> dict[str, str]:
        return {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        start, command = time.perf_counter(), [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        command += ["--model", checkpoint, "--task", "text-generation-with-past"]
        subprocess.run([*command, "--weight-format", *WEIGHTS[precision], folder], check=True)
        return time.perf_counter() - start

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = sizes.slots * sizes.length  # whole prompts, as its plain pipeline does
        scheduling.max_num_seqs, scheduling.enable_prefix_caching = sizes.slots, False
        properties = {"INFERENCE_NUM_THREADS": threads} | PROPERTIES[precision]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)

    def add_request(self, prompt: Prompt, new_tokens: int) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        self._requests += 1
        handle = self._pipeline.add_request(self._requests, openvino.Tensor(np.array([prompt], np.int64)), config)
        self._rows.append((handle, []))
        return self._rows[-1][1]

    def step(self) -> None:
        self._pipeline.step()
        for handle, row in self._rows:
            if handle.can_read():
                row += [token for output in handle.read().values() for token in output.generated_ids]

    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def cancel(self) -> None:
        for handle, _ in self._rows:
            handle.cancel()
        self._rows.clear()


if __name__ == "__main__":
    run(OpenVino)
