# SPDX-License-Identifier: Apache-2.0
"""This project: `generate()` on an artifact for each number of rows, and the engine for requests that come together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmark.model import Export, export
from benchmark.systems import System, artifact_config, load_ours, timed_call
from optimum_neuron import Request, __version__
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.engine.engine import Engine
from optimum_neuron.kernels.build.host import instruction_set

from ..names import QUANTIZED
from .protocol import Generated, Prompt, Sizes, UnsupportedError, run


class Ours:
    """One loaded artifact at a time: another number of rows loads another.

    Args:
        activations: as the option of an export.
    """

    def __init__(self, activations: str) -> None:
        self._activations = activations
        self._loaded: dict[int, System] = {}

    def versions(self) -> dict[str, str]:
        return {"optimum_neuron": __version__, "kernels": instruction_set().name, "torch": torch.__version__}

    def convert(self, checkpoint: str, precision: str, folder: str, sizes: Sizes) -> float | None:
        """Exports for every number of rows; the seconds are those of the first export."""
        (Path(folder) / "checkpoint").unlink(missing_ok=True)
        (Path(folder) / "checkpoint").symlink_to(Path(checkpoint).resolve())
        exports = [self._export(folder, precision, rows, sizes) for rows in sizes.batches]
        for other in exports[1:]:  # the same bytes: large models would fill the disk
            if _weights(other) == _weights(exports[0]):
                (other.path / WEIGHTS_NAME).unlink()
                os.link(exports[0].path / WEIGHTS_NAME, other.path / WEIGHTS_NAME)
        return exports[0].seconds

    def load(self, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        torch.set_num_threads(threads)
        self._sizes, self._paths = (
            sizes,
            {rows: self._export(folder, precision, rows, sizes).path for rows in sizes.batches},
        )
        self._use(sizes.batches[0])

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        if len(prompts) not in self._paths:
            raise UnsupportedError(f"no artifact for {len(prompts)} rows was exported")
        call = timed_call(self._use(len(prompts)), torch.tensor(prompts), new_tokens)
        return Generated(call.first_token, call.step * (new_tokens - 1), call.tokens.tolist())

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        model = self._use(self._sizes.slots).model
        engine = Engine(model.runner, vocab_size=model.artifact.model.vocab_size)
        for number, (prompt, new_tokens) in enumerate(requests):
            request = Request(
                request_id=str(number), prompt_token_ids=torch.tensor(prompt).numpy(), max_new_tokens=new_tokens
            )
            engine.add_request(request)
        count = 0
        while engine.has_work:
            count += len(engine.step())
        return count

    def _use(self, rows: int) -> System:
        if rows not in self._loaded:
            self._loaded.clear()  # its memory is free before the next one takes some
            self._loaded[rows] = load_ours(self._paths[rows])
        return self._loaded[rows]

    def _export(self, folder: str, precision: str, rows: int, sizes: Sizes) -> Export:
        config = artifact_config("bfloat16" if precision in QUANTIZED else precision, "cpu", rows, sizes.length)
        if precision in QUANTIZED:
            config = replace(config, quantization=precision, activations=self._activations)
        if rows == sizes.slots and rows > 1:  # this one serves requests too
            config = replace(config, mixed_step=True)
        return export(str((Path(folder) / "checkpoint").resolve()), config, Path(folder))


def _weights(exported: Export) -> dict[str, object]:
    """Size and digest, as the manifest has them."""
    described: dict[str, object] = Artifact.open(exported.path).manifest["files"][WEIGHTS_NAME]
    return described


if __name__ == "__main__":
    run(partial(Ours, sys.argv[1] if len(sys.argv) > 1 else "auto"))
