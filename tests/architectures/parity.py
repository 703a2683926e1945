# SPDX-License-Identifier: Apache-2.0
"""What is compared for one architecture: an exported tiny model on the eager target, and transformers' own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from configs import EXPERT_COUNTS, VOCAB, tiny_config
from helpers import artifact_runner, as_tensor, decode_rows, export_tiny, load_model
from huggingface_hub.errors import StrictDataclassError
from sharp import sharpen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from optimum_neuron.core import PromptPiece
from optimum_neuron.errors import first_line
from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.parity.inspect import check_fixed_shapes
from optimum_neuron.parity.text_length import keep_frequencies
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.cache_needs import CacheNeeds


# Longer than any window or attention chunk, and no multiple of one.
PROMPT, NEW_TOKENS = 29, 10
# Whole chunks, and pieces that end within chunks, windows and attention chunks.
EVEN, RAGGED = (8, 8, 8, 5), (3, 8, 1, 7, 2, 8)
# Steps and the whole prompt add in different orders, twice the rounding at most; the largest of many values varies.
NOISE_FACTOR = 2.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one architecture: the reason of a refusal, or what this environment lacks to make the model at all, or differences.

    These are the largest difference of a logit from transformers' in float64, and that of transformers' own float32. Greedy tokens agree with
    those of transformers' generate, and both chunkings to the bit. No graph can contain an `eager_only` one, as shapes follow values.
    """

    name: str
    reason: str | None = None
    lacking: str | None = None
    difference: float = 0.0
    noise: float = 0.0
    tokens_agree: bool = True
    chunkings_agree: bool = True
    routed: bool = False
    eager_only: bool = False

    @property
    def exact(self) -> bool:
        made = self.reason is None and self.lacking is None
        agree = self.tokens_agree and (self.chunkings_agree or self.eager_only)
        return made and agree and self.difference <= NOISE_FACTOR * self.noise


def compare(name: str, folder: Path) -> Outcome:
    """Makes, exports and runs one tiny model, which is an odd one: transformers is not to say so."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compare(name, folder)
    finally:
        logger.setLevel(level)


def _compare(name: str, folder: Path) -> Outcome:
    checkpoint = folder / "checkpoint"
    try:
        routed = make_checkpoint(name, checkpoint)
    except (ImportError, AttributeError, ValueError, StrictDataclassError) as error:
        # a package is missing, the class needs another config than its own, or the config's sizes depend on each other
        return Outcome(name, lacking=first_line(error).split(" but ")[0])
    try:
        artifact = export_tiny(checkpoint, folder / "artifact", sequence_length=64, ctx_batch_size=1)
    except ValueError as error:
        return Outcome(name, reason=str(error).replace(f"{checkpoint}: ", "").replace(str(checkpoint), "it"))
    runner = artifact_runner(artifact)
    prompt = tokens(PROMPT, seed=1)
    own = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    own.generation_config.eos_token_id = own.generation_config.forced_eos_token_id = None
    # Of itself generate numbers tokens from 0, where some models' forward pass numbers them from behind their padding id.
    first = CacheNeeds.read_code(own).first_position
    positions = {"position_ids": torch.arange(first, first + PROMPT)[None]} if first else {}
    with few_keys(own):  # of equal scores the first: torch leaves open which
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": False}
        text = own.generate(torch.from_numpy(prompt)[None].long(), **how, **positions)
        expected = logits_of(own, text)
        exact, noise = measure_noise(own, text, expected)
    generated = text[0, PROMPT:].tolist()
    found, chosen = run(runner, prompt, generated)
    even = prefill(runner, 1, prompt, EVEN)
    difference = max(float((logits - exact[place]).abs().max()) for place, logits in found.items())
    tokens_agree, chunkings_agree = chosen == generated, torch.equal(even[PROMPT - 1], found[PROMPT - 1])
    model, eager_only = load_model(checkpoint), False
    keep_frequencies(model)
    try:
        check_fixed_shapes(model, "cpu")
    except ValueError:
        eager_only = True
    return Outcome(name, None, None, difference, noise, tokens_agree, chunkings_agree, routed, eager_only)


def make_checkpoint(name: str, folder: Path) -> bool:
    """Writes a tiny random model; returns whether it has routed experts."""
    config = tiny_config(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    sharpen(model)
    model.save_pretrained(folder)
    parts = [config.to_dict()]
    for options in parts:  # and what is nested in it
        parts += [value for value in options.values() if isinstance(value, dict)]
    return any(options.get(key) for options in parts for key in EXPERT_COUNTS)


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB - 8, count).astype(np.int32)


def measure_noise(model: PreTrainedModel, text: Tensor, expected: Tensor) -> tuple[Tensor, float]:
    """The best known logits, and how far transformers' float32 is from them after the prompt's first tokens."""
    try:
        exact = logits_of(model.double(), text)
    except RuntimeError:  # code that cannot run in float64: rounding shows between texts of several lengths
        model.float()
        parts = [logits_of(model, text[:, :length]) for length in range(RAGGED[0], text.shape[1])]
        return expected, max(float((part - expected[: len(part)]).abs().max()) for part in parts)
    return exact, float((expected - exact)[RAGGED[0] - 1 :].abs().max())


@torch.no_grad()
def logits_of(model: nn.Module, text: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=text, use_cache=False).logits[0].double()
    return logits


def prefill(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: Sequence[int]) -> dict[int, Tensor]:
    """Logits after each piece by the index of its last token."""
    runner.reset_slots()
    found, start = {}, 0
    for count in pieces:
        output = runner.run_step([PromptPiece(slot, prompt[start : start + count])])
        assert output.chunk_logits is not None
        start += count
        found[start - 1] = as_tensor(output.chunk_logits[0])
    return found


def run(runner: GraphRunner, prompt: np.ndarray, generated: Sequence[int]) -> tuple[dict[int, Tensor], list[int]]:
    """A prompt in ragged chunks and its tokens one by one, some of them beside the chunks of a neighbor's prompt.

    Returns logits by the index of their token, and the greedy tokens.
    """
    found = prefill(runner, 1, prompt, RAGGED)
    chosen = [int(found[PROMPT - 1].argmax())]
    neighbor = [tokens(count, seed=count) for count in (5, 8, 3)]
    for index, token in enumerate(generated[:-1]):
        beside = [PromptPiece(0, neighbor.pop())] if neighbor and index % 2 else []
        output = runner.run_step(beside, decode_rows(runner, {1: token}))
        assert output.decode_logits is not None and output.decode_tokens is not None
        found[PROMPT + index] = as_tensor(output.decode_logits[1])
        chosen.append(int(output.decode_tokens[1]))
    return found, chosen
