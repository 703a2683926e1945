# SPDX-License-Identifier: Apache-2.0
"""A worker without a runtime: `python fake_worker.py WAY` answers at once, or fails in the way that is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from benchmark.peers.workers.protocol import Generated, Prompt, Runtime, Sizes, UnsupportedError, run


class Fake(Runtime):
    """Each new token is the sum of its prompt."""

    def __init__(self, way: str) -> None:
        self._way = way
        if way == "no import":
            raise ImportError("no such runtime")

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        os.write(1, b"what a library prints is no answer\n")
        if precision == "int4":
            raise UnsupportedError("no int4")
        return float(sizes.slots)

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        if self._way == "no load":
            raise RuntimeError("the file is broken\nand more")

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        if self._way == "dies" and len(prompts) > 1:
            sys.stderr.write("fatal Error: out of memory\n")
            os._exit(3)
        if self._way == "hangs":
            sys.stdin.read()
        return Generated(0.5, 0.25 * (new_tokens - 1), [[sum(prompt)] * new_tokens for prompt in prompts])

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        if self._way == "no requests":
            return super().serve(requests)
        return sum(new_tokens for _, new_tokens in requests) - (self._way == "short")


if __name__ == "__main__":
    run(partial(Fake, sys.argv[1]))
