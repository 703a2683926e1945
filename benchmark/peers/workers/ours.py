# SPDX-License-Identifier: Apache-2.0
"""This project: its engine on an artifact for each number of rows, as `neuron serve` and `TextModel` run it. What is measured imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from optimum_neuron import Request, __version__
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import RequestFailure
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
from optimum_neuron.runtime.timing import load_runner

from ..names import QUANTIZED
from .protocol import Generated, Prompt, Sizes, UnsupportedError, run
from .stepping import SteppingRuntime


EXPORTS = "exports.json"  # the artifact of each number of rows


class Ours(SteppingRuntime):
    """One loaded artifact at a time: another number of rows loads another.

    Args:
        activations: as the option of an export.
    """

    def __init__(self, activations: str) -> None:
        self._activations = activations
        self._loaded: dict[int, Engine] = {}
        self._names = map(str, count())
        self._rows: dict[str, list[int]] = {}

    def versions(self) -> dict[str, str]:
        return {"optimum_neuron": __version__, "kernels": choose_instruction_set().name}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        """Export for every number of rows; the seconds are those of the first export. This alone imports torch, in a process of its own."""
        from benchmark.model import export, generate_config

        exports = {}
        for rows in sorted({*sizes.batches, sizes.slots}):
            config = generate_config("bfloat16" if precision in QUANTIZED else precision, rows, sizes.length)
            if precision in QUANTIZED:
                config = replace(config, quantization=precision, activations=self._activations)
            if rows == sizes.slots and rows > 1:  # this one serves requests too
                config = replace(config, mixed_step=True)
            exports[rows] = export(checkpoint, config, Path(folder))
        first, *others = exports.values()
        weights = Artifact.open(first.path).manifest["files"][WEIGHTS_NAME]
        for other in others:  # the same bytes: large models would fill the disk
            if Artifact.open(other.path).manifest["files"][WEIGHTS_NAME] == weights:
                (other.path / WEIGHTS_NAME).unlink()
                os.link(first.path / WEIGHTS_NAME, other.path / WEIGHTS_NAME)
        names = {rows: each.path.name for rows, each in exports.items()}
        Path(folder, EXPORTS).write_text(json.dumps(names), encoding="utf-8")
        return first.seconds

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        names = json.loads(Path(folder, EXPORTS).read_text(encoding="utf-8"))
        self._exported = {int(rows): Path(folder, name) for rows, name in names.items()}
        self._slots = sizes.slots
        self._use(sizes.batches[0])  # threads are those of OMP_NUM_THREADS

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        if len(prompts) not in self._exported:
            raise UnsupportedError(f"no artifact for {len(prompts)} rows was exported")
        self._use(len(prompts))
        return super().generate(prompts, new_tokens)

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        self._use(self._slots)
        return super().serve(requests)

    def add_request(self, prompt: Prompt, new_tokens: int) -> list[int]:
        name = next(self._names)
        self._engine.add_request(
            Request(request_id=name, prompt_token_ids=np.array(prompt), max_new_tokens=new_tokens)
        )
        return self._rows.setdefault(name, [])

    def step(self) -> None:
        for event in self._engine.step():
            if isinstance(event, RequestFailure):
                raise event.error
            self._rows[event.request_id].append(event.token_id)

    def is_busy(self) -> bool:
        return self._engine.has_work

    def cancel(self) -> None:
        self._engine.abort_requests()
        self._rows.clear()

    @property
    def _engine(self) -> Engine:
        return next(iter(self._loaded.values()))

    def _use(self, rows: int) -> None:
        if rows not in self._loaded:
            self._loaded.clear()  # its memory is free before the next one takes some
            artifact = Artifact.open(self._exported[rows])
            runner = load_runner(artifact, trust_native_code=True)
            self._loaded[rows] = Engine(runner, vocab_size=artifact.model.vocab_size)


if __name__ == "__main__":
    run(partial(Ours, sys.argv[1] if len(sys.argv) > 1 else "auto"))
