# SPDX-License-Identifier: Apache-2.0
"""Golden tokens: what the model answers to a fixed prompt on the exporting host, kept to judge a device by.

A device is judged teacher-forced: whatever it would choose, it is fed the golden tokens, so that one near-tie does not
change all that follows.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .. import progress
from ..config import NeuronConfig
from ..step.attention.kv_cache import KVCache
from ..step.model_spec import ModelSpec
from ..step.ops import EAGER_OPS
from ..step.spec import GREEDY, graph_specs
from ..step.state_specs import state_specs
from ..step.step import StepModule
from ..targets.eager import EagerExecutable
from .prefill import cut_prompt
from .runner import GraphRunner
from .step_tensors import DecodeRows


GOLDEN_NAME = "golden.json"
NEW_TOKENS = 8
LONGEST_PROMPT = 768
# Logits kept per token: the chosen one and its rivals.
KEPT_LOGITS = 8


@dataclass(frozen=True)
class Golden:
    """A prompt, the greedy tokens that follow it, and for each the most probable candidates and their logits, falling."""

    prompt: list[int]
    tokens: list[int]
    candidates: list[list[int]]
    logits: list[list[float]]

    @classmethod
    def read(cls, folder: Path) -> Golden:
        """Read an artifact's; raise FileNotFoundError where it has none, and ValueError where they cannot be read."""
        path = folder / GOLDEN_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no golden tokens ({error}); export the model again") from error

    def write(self, folder: Path) -> None:
        (folder / GOLDEN_NAME).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")


def record(model: nn.Module, config: NeuronConfig, spec: ModelSpec) -> Golden:
    """Run a loaded model with the eager target on a prompt of more than one chunk, where the sizes allow one."""
    own = dataclasses.replace(
        config,
        batch_size=1,
        ctx_batch_size=1,
        mixed_step=False,
        context_buckets=tuple(config.context_buckets),
        output_logits=True,
        prompt_logits=False,
        tensor_parallel_size=1,
        float32_reduce=False,
        kernels=(),
        target="eager",
    )
    cache, graphs = KVCache(state_specs(own, spec)), graph_specs(own)
    steps = {graph.name: StepModule(model, cache, graph, EAGER_OPS).eval() for graph in graphs}
    runner = GraphRunner(EagerExecutable(steps, cache), own, graphs, spec)
    count = min(NEW_TOKENS, own.sequence_length)
    # The last token is not fed, so it takes no row of the cache.
    length = min(own.prefill_chunk_size * 3 // 2 + 1, LONGEST_PROMPT, own.sequence_length - count + 1)
    prompt = np.random.default_rng(0).integers(0, min(spec.vocab_size, spec.num_embeddings), length).astype(np.int32)
    rows = [torch.from_numpy(row) for _, row in replay(runner, prompt, count) if row is not None]
    top = [row.topk(min(KEPT_LOGITS, spec.vocab_size)) for row in rows]
    return Golden(
        prompt=prompt.tolist(),
        tokens=[int(row.argmax()) for row in rows],
        candidates=[each.indices.tolist() for each in top],
        logits=[each.values.tolist() for each in top],
    )


def replay(
    runner: GraphRunner, prompt: np.ndarray, count: int, tokens: list[int] | None = None
) -> list[tuple[int, np.ndarray | None]]:
    """Feed a prompt and then `count` - 1 tokens to slot 0: `tokens`, or those that the runner chooses.

    Return what follows the prompt and each fed token: the greedy token, and logits `[vocab]`, None where graphs return none.
    """
    runner.reserve_slots([len(prompt) + count - 1])
    slots = np.arange(runner.config.batch_size, dtype=np.int32)
    sampling = np.tile(np.asarray(GREEDY, dtype=np.float32), (len(slots), 1))
    rows = DecodeRows(np.zeros_like(slots), slots == 0, sampling, np.zeros(len(slots), np.float32))
    chunks = cut_prompt(0, prompt, runner.config.prefill_chunk_size)
    with progress.stage("Following a prompt", len(chunks) + count - 1) as advance:
        for chunk in chunks:
            output = runner.run_step([chunk])
            advance("its tokens")
        steps = [_chosen(output.chunk_tokens, output.chunk_logits)]
        for index in range(count - 1):
            rows.token_ids[0] = steps[-1][0] if tokens is None else tokens[index]
            output = runner.run_step((), rows)
            steps.append(_chosen(output.decode_tokens, output.decode_logits))
            advance("what follows")
    return steps


def _chosen(tokens: np.ndarray | None, logits: np.ndarray | None) -> tuple[int, np.ndarray | None]:
    kept = None if logits is None else logits[0].copy()  # a graph may use its output memory again
    if tokens is not None:
        return int(tokens[0]), kept
    assert kept is not None
    return int(kept.argmax()), kept
