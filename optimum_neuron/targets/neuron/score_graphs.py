# SPDX-License-Identifier: Apache-2.0
"""The graphs that read what steps left of their logits: those that draw tokens, and those that tell log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import NeuronConfig
from ...step.spec import DECODE, LOGPROBS, TensorSpec, row_counts, sampler_inputs
from .graph_io import CHOSEN, SAMPLERS, SCORES


@dataclass(frozen=True)
class ScoreGraph:
    """A graph over the logits of a group of rows.

    Attributes:
        scores: the state, as a rank has it.
        chosen: the state in which it notes whose token is which; None where it chooses none.
    """

    name: str
    group: str
    scores: TensorSpec
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    chosen: TensorSpec | None = None

    @property
    def told(self) -> int:
        """Of how many of the most likely tokens it tells log-probabilities."""
        return self.outputs[-1].shape[1] if len(self.outputs[-1].shape) > 1 else 0


def score_graphs(config: NeuronConfig, vocab_size: int) -> tuple[ScoreGraph, ...]:
    """Those of an artifact, in the order in which they are lowered."""
    if not config.on_device_sampling:
        return ()
    columns = -(-vocab_size // config.tensor_parallel_size)
    scores = {
        group: TensorSpec(SCORES + group, (rows, columns), "float32") for group, rows in row_counts(config).items()
    }
    chosen = chosen_state(config)
    graphs = [_sampler(group, state, chosen) for group, state in scores.items()]
    if config.top_logprobs is not None and not config.returns_decode_logits:
        graphs.append(_logprobs(scores[DECODE], config.top_logprobs))
    return tuple(graphs)


def chosen_state(config: NeuronConfig) -> TensorSpec:
    """Each slot's last token."""
    return TensorSpec(CHOSEN, (config.batch_size,), "int32")


def slots_input(group: str) -> str:
    """The input of a group's sampler that says whose token each row draws."""
    return f"{group}.slots"


def _sampler(group: str, scores: TensorSpec, chosen: TensorSpec) -> ScoreGraph:
    rows = scores.shape[0]
    tokens = TensorSpec(f"{group}.tokens", (rows,), "int32")
    inputs = (*sampler_inputs(group, rows), TensorSpec(slots_input(group), (rows,), "int32"))
    return ScoreGraph(SAMPLERS[group], group, scores, inputs, (tokens,), chosen)


def _logprobs(scores: TensorSpec, count: int) -> ScoreGraph:
    """As `step.sampling.logprobs.Logprobs`; without the most likely tokens where none is wanted: no device takes empty tensors."""
    rows = scores.shape[0]
    outputs = [TensorSpec(f"{DECODE}.logprobs", (rows,), "float32"), TensorSpec(f"{DECODE}.ranks", (rows,), "int32")]
    if count:
        outputs.append(TensorSpec(f"{DECODE}.top_tokens", (rows, count), "int32"))
        outputs.append(TensorSpec(f"{DECODE}.top_logprobs", (rows, count), "float32"))
    chosen = TensorSpec(f"{DECODE}.chosen", (rows,), "int32")
    return ScoreGraph(LOGPROBS, DECODE, scores, (chosen,), tuple(outputs))
