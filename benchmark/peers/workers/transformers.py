# SPDX-License-Identifier: Apache-2.0
"""transformers: `generate()` with its defaults or with a compiled static cache, and its continuous batching.

python -m benchmark.peers.workers.transformers eager|static
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmark.systems import load_peers, timed_call

from .protocol import Generated, Prompt, Sizes, UnsupportedError, run


PAGE_TOKENS = 128


class Transformers:
    """A model under one of the two ways."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._compiled_for = (0, 0, 0)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}

    def convert(self, checkpoint: str, precision: str, folder: str, sizes: Sizes) -> float | None:
        """Nothing to convert: a link to the checkpoint."""
        (Path(folder) / "checkpoint").symlink_to(Path(checkpoint).resolve())
        return 0.0

    def load(self, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        torch.set_num_threads(threads)
        (self._system,) = load_peers(str((Path(folder) / "checkpoint").resolve()), precision, [self._way])
        self._sizes = sizes

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        shape = (len(prompts), len(prompts[0]), new_tokens)
        if shape != self._compiled_for:
            self._system.forget_shapes()
            self._compiled_for = shape
        call = timed_call(self._system, torch.tensor(prompts), new_tokens)
        return Generated(call.first_token, call.step * (new_tokens - 1), call.tokens.tolist())

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        if self._way == "static":
            raise UnsupportedError(
                "rows of a static cache begin and end together: it does not serve requests of mixed lengths"
            )
        slots = self._sizes.slots
        config = ContinuousBatchingConfig(
            max_batch_tokens=max(512, slots),
            page_size=PAGE_TOKENS,
            num_blocks=slots * -(-self._sizes.length // PAGE_TOKENS) + slots,
            max_requests_per_batch=slots,
            allow_block_sharing=False,
        )
        generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
        manager = self._system.model.init_continuous_batching(generation, continuous_batching_config=config)
        manager.start()
        try:
            for number, (prompt, new_tokens) in enumerate(requests):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=new_tokens)
            return sum(self._finished(manager) for _ in requests)
        finally:
            manager.stop(block=True)

    def _finished(self, manager: Any) -> int:
        """The new tokens of the next request that is done."""
        while True:
            output = manager.get_result(timeout=0.1)
            if output is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped; see its log")
            if output is not None and output.error is not None:
                raise RuntimeError(f"transformers failed request {output.request_id}: {output.error}")
            if output is not None and output.is_finished():
                return len(output.generated_tokens)


if __name__ == "__main__":
    run(partial(Transformers, sys.argv[1]))
