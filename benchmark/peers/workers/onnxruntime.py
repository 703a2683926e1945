# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime GenAI: its generator. Rows begin and end together; its batching engine is not driven here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import onnxruntime_genai

from .protocol import Generated, Prompt, Runtime, Sizes, run


WEIGHTS = {"float32": "fp32", "int8": "int8", "int4": "int4"}


class OnnxRuntime(Runtime):
    """A model; every call has a generator of its own."""

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        start, command = time.perf_counter(), [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-m", checkpoint, "-o", folder, "-p", WEIGHTS[precision], "-e", "cpu", "-c", f"{folder}/cache"]
        subprocess.run(command, check=True)
        return time.perf_counter() - start

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        config = onnxruntime_genai.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        length, rows = len(prompts[0]), len(prompts)
        start = time.perf_counter()
        options = onnxruntime_genai.GeneratorParams(self._model)
        total = length + new_tokens
        # with a minimum of as many tokens, the end of a text is not chosen
        options.set_search_options(max_length=total, min_length=total, batch_size=rows, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, options)
        generator.append_tokens(np.array(prompts, np.int32).squeeze(0) if rows == 1 else np.array(prompts, np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        end = time.perf_counter()
        tokens = [[int(token) for token in generator.get_sequence(row)[length:]] for row in range(rows)]
        return Generated(first - start, end - first, tokens)


if __name__ == "__main__":
    run(OnnxRuntime)
