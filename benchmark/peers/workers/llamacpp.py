# SPDX-License-Identifier: Apache-2.0
"""llama.cpp by the functions of its C library, batched as its server batches: decoding rows first, then prompts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np

from .protocol import Generated, Prompt, Runtime, Sizes, run


STEP_TOKENS = 2048
FLOAT32 = 0  # ggml's number of the type
FILE_TYPES = {
    "float32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


@dataclass
class Row:
    """A sequence: what is left of its prompt, how much of it the cache has, and its new tokens."""

    number: int
    prompt: Prompt
    wanted: int
    done: int = 0
    tokens: list[int] = field(default_factory=list)


class LlamaCpp(Runtime):
    """A model, and a context that is made anew where rows do not fit."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self._context: ctypes.c_void_p | None = None
        self._held = (0, 0)

    def versions(self) -> dict[str, str]:
        features = llama_cpp.llama_print_system_info().decode().partition("CPU : ")[2]
        built = " ".join(word.split(" = ")[0].strip() for word in features.split("|") if "= 1" in word)
        return {"llama-cpp-python": llama_cpp.__version__, "built for": built}

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        """Cast or quantize `model.gguf` of the checkpoint's folder, which gguf_file.py writes."""
        start, source = time.perf_counter(), Path(checkpoint) / "model.gguf"
        target = Path(folder) / "model.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = FILE_TYPES[precision], True
        paths = (str(source).encode(), str(target).encode())
        if llama_cpp.llama_model_quantize(*paths, ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp did not quantize {source} to {precision}")
        return time.perf_counter() - start

    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        options = llama_cpp.llama_model_default_params()
        path = str(Path(folder) / "model.gguf")
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads, self._slots, self._is_float32 = threads, sizes.slots, precision == "float32"
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self._hold(1, sizes.length)

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        rows = [Row(number, prompt, new_tokens) for number, prompt in enumerate(prompts)]
        self._hold(len(rows), len(prompts[0]) + new_tokens)
        start = time.perf_counter()
        while any(not row.tokens for row in rows):
            self._step([row for row in rows if not row.tokens])
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            self._step(rows)
        return Generated(first - start, time.perf_counter() - first, [row.tokens for row in rows])

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        slots = min(self._slots, len(requests))
        self._hold(slots, max(len(prompt) + wanted for prompt, wanted in requests))
        waiting, free, count = list(requests), list(range(slots)), 0
        rows: list[Row] = []
        while waiting or rows:
            while waiting and free:
                rows.append(Row(free.pop(), *waiting.pop(0)))
            self._step(rows)
            for row in [row for row in rows if len(row.tokens) == row.wanted]:
                rows.remove(row)
                free.append(row.number)
                count += len(row.tokens)
                llama_cpp.llama_memory_seq_rm(self._memory, row.number, -1, -1)
        return count

    def _hold(self, rows: int, length: int) -> None:
        """Have an empty context for so many rows of such a length."""
        if rows != self._held[0] or length > self._held[1]:
            self._new_context(rows, -(-length // 256) * 256)  # llama.cpp rounds up itself
        llama_cpp.llama_memory_clear(self._memory, False)

    def _new_context(self, rows: int, length: int) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = rows * length, rows, STEP_TOKENS
        options.n_threads = options.n_threads_batch = self._threads
        if self._is_float32:  # else the default, float16
            options.type_k = options.type_v = FLOAT32
        options.kv_unified, options.no_perf = False, True
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {rows} rows of {length} tokens")
        self._memory, self._held = llama_cpp.llama_get_memory(self._context), (rows, length)

    def _step(self, rows: Sequence[Row]) -> None:
        """Compute one batch: rows that decode, and as much of the prompts as fits."""
        batch, computed = self._batch, []
        batch.n_tokens = 0
        for row in sorted(rows, key=lambda row: not row.tokens):
            part = row.prompt[row.done :][: STEP_TOKENS - batch.n_tokens] or row.tokens[-1:]
            for token in part:
                self._add(row, token)
            if part and row.done >= len(row.prompt):
                batch.logits[batch.n_tokens - 1] = True
                computed.append((row, batch.n_tokens - 1))
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp failed a batch of {batch.n_tokens} tokens")
        for row, place in computed:
            logits = llama_cpp.llama_get_logits_ith(self._context, place)
            row.tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))

    def _add(self, row: Row, token: int) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place], batch.pos[place] = token, row.done
        batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, row.number, False
        batch.n_tokens += 1
        row.done += 1


if __name__ == "__main__":
    run(LlamaCpp)
