# SPDX-License-Identifier: Apache-2.0
"""This project: `generate()` on an artifact for each number of rows, and the engine for requests that come together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmark.model import Export, export, generate_config
from benchmark.systems import System, load_ours, timed_call
from optimum_neuron import Request, __version__
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.engine.engine import Engine
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set

from ..names import QUANTIZED
from .protocol import Generated, Prompt, Runtime, Sizes, UnsupportedError, run


class Ours(Runtime):
    """One loaded artifact at a time: another number of rows loads another.

    Args:
        activations: as the option of an export.
    """

    def __init__(self, activations: str) -> None:
        self._activations = activations
        self._loaded: dict[int, System] = {}

    def versions(self) -> dict[str, str]:
        return {"optimum_neuron": __version__, "kernels": choose_instruction_set().name, "torch": torch.__version__}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        """Export for every number of rows; the seconds are those of the first export."""
        first, *others = self._exports(checkpoint, folder, precision, sizes).values()
        weights = Artifact.open(first.path).manifest["files"][WEIGHTS_NAME]
        for other in others:  # the same bytes: large models would fill the disk
            if Artifact.open(other.path).manifest["files"][WEIGHTS_NAME] == weights:
                (other.path / WEIGHTS_NAME).unlink()
                os.link(first.path / WEIGHTS_NAME, other.path / WEIGHTS_NAME)
        return first.seconds

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        torch.set_num_threads(threads)
        self._exported, self._slots = self._exports(checkpoint, folder, precision, sizes), sizes.slots
        self._use(sizes.batches[0])

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        if len(prompts) not in self._exported:
            raise UnsupportedError(f"no artifact for {len(prompts)} rows was exported")
        call = timed_call(self._use(len(prompts)), torch.tensor(prompts), new_tokens)
        return Generated(call.first_token, call.step * (new_tokens - 1), call.tokens.tolist())

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        model = self._use(self._slots).model
        engine = Engine(model.runner, vocab_size=model.artifact.model.vocab_size)
        for number, (prompt, new_tokens) in enumerate(requests):
            tokens = np.array(prompt)
            engine.add_request(Request(request_id=str(number), prompt_token_ids=tokens, max_new_tokens=new_tokens))
        count = 0
        while engine.has_work:
            count += len(engine.step())
        return count

    def _use(self, rows: int) -> System:
        if rows not in self._loaded:
            self._loaded.clear()  # its memory is free before the next one takes some
            self._loaded[rows] = load_ours(self._exported[rows].path)
        return self._loaded[rows]

    def _exports(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> dict[int, Export]:
        exports = {}
        for rows in sizes.batches:
            config = generate_config("bfloat16" if precision in QUANTIZED else precision, rows, sizes.length)
            if precision in QUANTIZED:
                config = replace(config, quantization=precision, activations=self._activations)
            if rows == sizes.slots and rows > 1:  # this one serves requests too
                config = replace(config, mixed_step=True)
            exports[rows] = export(checkpoint, config, Path(folder))
        return exports


if __name__ == "__main__":
    run(partial(Ours, sys.argv[1] if len(sys.argv) > 1 else "auto"))
