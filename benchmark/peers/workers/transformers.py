# SPDX-License-Identifier: Apache-2.0
"""transformers: `generate()` with its defaults or with a compiled static cache, and its continuous batching.

python -m benchmark.peers.workers.transformers eager|static
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

import torch
from transformers import CompileConfig

from benchmark.model import load_transformers
from benchmark.systems import System, continuous_batching, next_output, timed_call

from .protocol import Generated, Prompt, Runtime, Sizes, run


class Transformers(Runtime):
    """A model under one of the two ways."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._compiled_for = (0, 0, 0)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        torch.set_num_threads(threads)
        self._sizes, self._system = sizes, System(self._way, load_transformers(checkpoint, precision))
        if self._way == "static":
            compiling = CompileConfig()
            # On the CPU generate() skips compilation without this, even when it is given a compile_config.
            compiling._compile_all_devices = True
            self._system.options = {"cache_implementation": "static", "compile_config": compiling}

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        shape = (len(prompts), len(prompts[0]), new_tokens)
        if shape != self._compiled_for and self._way == "static":
            self._forget_shapes()
            self._compiled_for = shape
        call = timed_call(self._system, torch.tensor(prompts), new_tokens)
        return Generated(call.first_token, call.step * (new_tokens - 1), call.tokens.tolist())

    def _forget_shapes(self) -> None:
        """Start afresh: a cache of this case's own size, and no recompilation limit in reach.

        In one long process it would keep the largest cache so far, and slow down by dynamic shapes.
        """
        torch._dynamo.reset()
        for name in ("_compiled_call", "_previous_max_cache_length"):
            self._system.model.__dict__.pop(name, None)

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        if self._way == "static":
            return super().serve(requests)
        slots, count, open_requests = self._sizes.slots, 0, len(requests)
        with continuous_batching(self._system.model, max(512, slots), slots, slots * self._sizes.length) as manager:
            for number, (prompt, new_tokens) in enumerate(requests):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=new_tokens)
            while open_requests:
                output = next_output(manager)
                if output is not None and output.is_finished():
                    open_requests -= 1
                    count += len(output.generated_tokens)
        return count


if __name__ == "__main__":
    run(partial(Transformers, sys.argv[1]))
