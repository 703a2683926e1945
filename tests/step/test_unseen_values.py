# SPDX-License-Identifier: Apache-2.0
"""What a token does not see has no effect, whatever it is; and a request that is not finite stays alone with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import configs
from canaries import CANARIES, fill_unseen, same_bits, serve_steps
from feature_models import FEATURES, spec_of
from helpers import (
    ARCHITECTURES,
    TRASH_ROW,
    VOCAB,
    artifact_runner,
    as_tensor,
    decode_tokens,
    eager_runner,
    export_tiny,
    fill_rows,
    load_model,
    prefill_pieces,
    random_tokens,
    read_states,
    reuse_prefix,
    tiny_config,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from optimum_neuron.core import PromptPiece
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import BY_TOKEN
from optimum_neuron.targets.cpu.executable import LiveTokens


BROKEN = 77  # a token whose row of the embedding is not finite
# With convolutions, with attention in code of its own, within blocks of positions.
MODELS = (*ARCHITECTURES, "lfm2", "codegen", "llama4_text")
# Of selected and compressed keys, and of codes.
SELECTING = ("glm_moe_dsa", "minimax_m3_vl_text", "qwen4_exp_text", "deepseek_v4", "gemma2 in int8")
# On the cpu target: with sinks, latent attention, float16, without convolutions and with.
SHARED = ("llama", "gpt_oss", "lfm2")  # artifacts of other tests
COMPILED = (*(f"{name}-cpu" for name in SHARED), "deepseek_v3-cpu", "codegen-cpu", "qwen3-cpu-float16")


@pytest.fixture(scope="module")
def checkpoints(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = dict(sharp_checkpoints)
    for name in ("codegen", "llama4_text"):
        config = configs.tiny_config(name)
        config.vocab_size = VOCAB
        made[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, tuple[nn.Module, ModelSpec]]:
    """With the cached attention, not to be changed, and what they keep."""
    made = {name: load_model(checkpoints[name]) for name in MODELS}
    found = {name: (model, inspect_model(model)) for name, model in made.items()}
    return found | {name: (FEATURES[name].model(), spec_of(name)) for name in SELECTING}


@pytest.fixture(scope="module")
def eager(models: dict[str, tuple[nn.Module, ModelSpec]]) -> dict[str, GraphRunner]:
    return {name: eager_runner(models[name][0], tiny_config(), spec=models[name][1]) for name in MODELS}


@pytest.fixture(scope="module")
def runner_of(
    eager: dict[str, GraphRunner],
    cpu_artifact: Callable[[str], Path],
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], GraphRunner]:
    """By the name of a model, and where it is not eager, the target and a dtype."""

    def open_one(name: str) -> GraphRunner:
        model, *rest = name.split("-")
        if not rest:
            return eager[model]
        if rest == ["cpu"] and model in SHARED:
            return artifact_runner(cpu_artifact(model))
        changes = {"dtype": rest[1]} if rest[1:] else {}
        return artifact_runner(
            export_tiny(checkpoints[model], tmp_path_factory.mktemp("cpu") / name, target="cpu", **changes)
        )

    return cache(open_one)


with_runners = pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)]
)


@with_runners
def test_what_no_token_sees_and_a_neighbor_that_is_not_finite_change_no_bit(
    name: str, runner_of: Callable[[str], GraphRunner], models: dict[str, tuple[nn.Module, ModelSpec]]
) -> None:
    runner, spec = runner_of(name), models[name.split("-")[0]][1]
    alone, beside = serve_steps(runner, spec), serve_steps(runner, spec, neighbor=0.0)
    for canary in CANARIES:
        assert same_bits(serve_steps(runner, spec, unseen=canary), alone)
        assert same_bits(serve_steps(runner, spec, neighbor=canary), beside)


@with_runners
def test_idle_rows_leave_finite_numbers_whatever_they_find(
    name: str,
    runner_of: Callable[[str], GraphRunner],
    models: dict[str, tuple[nn.Module, ModelSpec]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveTokens, "__call__", lambda self, inputs: 1 << 40)  # else the cpu target leaves most out
    runner, spec = runner_of(name), models[name.split("-")[0]][1]
    runner.reset_slots()
    fill_unseen(runner, spec, torch.nan)
    for _ in range(4):  # as many steps as the longest convolution looks back
        runner.run_step([PromptPiece(0, random_tokens(3))])
        decode_tokens(runner, {0: 5})
    states = read_states(runner, spec)
    kept = [state[TRASH_ROW] for each, state in states.items() if ".conv_" in each]
    written = [state[TRASH_ROW, :, 1:3] for each, state in states.items() if ".conv_" not in each]
    runner.reset_slots()
    fill_rows(runner, spec, range(TRASH_ROW + 1), 0.0)
    assert all(state.isfinite().all() for state in written)
    # the cpu target's convolution neither reads nor writes for idle rows; the reference pushes out what was there
    assert all((state.isnan() if "-cpu" in name else state.isfinite()).all() for state in kept)


def broken_runner(model: nn.Module, spec: ModelSpec, value: float, **sizes: Any) -> GraphRunner:
    """A model whose embedding of one token, not its logit, holds a number that is not finite."""
    changed: Any = copy.deepcopy(model)
    embedding = changed.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)  # untied
    embedding.weight[BROKEN, 11] = value
    return eager_runner(changed, tiny_config(**sizes), spec=spec)


def sizes_of(name: str) -> dict[str, Any]:
    return FEATURES[name].sizes if name in SELECTING else {}


@pytest.mark.parametrize("value", CANARIES)
@pytest.mark.parametrize("name", [*MODELS, *SELECTING])
def test_a_broken_token_stays_with_those_who_see_it(
    name: str, value: float, models: dict[str, tuple[nn.Module, ModelSpec]]
) -> None:
    model, spec = models[name]
    runner = broken_runner(model, spec, value, **sizes_of(name))
    prompt, other = random_tokens(20, seed=5), random_tokens(12, seed=6)
    prompt[prompt == BROKEN], other[other == BROKEN] = 4, 4
    place = 13  # in a row of the second chunk, with tokens before and behind
    tampered = np.concatenate([prompt[:place], [BROKEN], prompt[place + 1 :]]).astype(np.int32)

    def serve(first: np.ndarray) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Both prompts in chunks beside each other, then a token each."""
        logits = []
        for start, stop in ((0, 8), (8, 16), (16, 20)):
            chunks = [PromptPiece(0, first[start:stop])] + (
                [PromptPiece(1, other[start:stop][:6])] if start < 12 else []
            )
            output = runner.run_step(chunks)
            assert output.chunk_logits is not None
            logits.append(as_tensor(output.chunk_logits))
        logits.append(decode_tokens(runner, {0: 5, 1: 6})[1])
        return logits, read_states(runner, spec)

    healthy, states = serve(prompt)
    runner.reset_slots()
    broken, after = serve(tampered)
    assert all(torch.equal(left[1], right[1]) for left, right in zip(healthy[:2], broken[:2], strict=True))
    assert torch.equal(healthy[3][1], broken[3][1])
    assert not healthy[3][0].isnan().any()
    if name != "codegen":  # its own attention sees zeros in place of a broken token
        assert broken[2][0].isnan().all() and broken[3][0].isnan().all()
    rows = [key for key in states if key.startswith(BY_TOKEN)]
    assert all(torch.equal(after[key][0, :, :place], states[key][0, :, :place]) for key in rows)
    if spec.reuses_prefixes:
        reuse_prefix(runner, 2, 0, place)
        assert torch.equal(prefill_pieces(runner, 2, prompt[place:], [3, 4]), healthy[2][0])
    runner.reset_slots()
    prefill_pieces(runner, 0, tampered, [3, 16, 1])  # who sees it does not depend on chunks
    decode_tokens(runner, {0: 5})
    for key, state in read_states(runner, spec).items():
        if key.startswith((*BY_TOKEN, "kv_cache.conv_")):
            assert torch.equal(state[0].nan_to_num(123.0), after[key][0].nan_to_num(123.0))
    runner.reset_slots()
    again, _ = serve(prompt)
    assert all(torch.equal(left[0], right[0]) for left, right in zip(again, healthy, strict=True))
