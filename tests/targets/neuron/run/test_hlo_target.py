# SPDX-License-Identifier: Apache-2.0
"""The hlo target: the lowered bytes, run by XLA on this CPU, give the tokens of the eager target in all graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from canaries import CANARIES, same_bits, serve_steps
from helpers import (
    LOWERED,
    artifact_runner,
    decode_rows,
    eager_runner,
    export_tiny,
    generate,
    load_model,
    random_tokens,
    tiny_config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.arrays import to_numpy
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.golden import Golden
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import FROM_SLOT
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import GREEDY, SamplingParams
from optimum_neuron.targets import get_target
from optimum_neuron.targets.neuron.lint.lint import lint_artifact
from optimum_neuron.targets.neuron.run import executors


NOISE = 1e-6  # of logits between -1 and 1, by other orders of summation in float32
SAMPLED = SamplingParams(20, 0.9, 0.8)
PROMPT = random_tokens(29)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LOWERED)
def test_tokens_are_those_of_the_eager_target(
    name: str, sampling: SamplingParams, hlo_artifact: Callable[[str], Path], sharp_checkpoints: dict[str, Path]
) -> None:
    uniforms = torch.rand(12).tolist()
    reference = eager_runner(load_model(sharp_checkpoints[name]), tiny_config())
    expected, logits = generate(reference, PROMPT, 12, sampling, uniforms)
    artifact = Artifact.open(hlo_artifact(name))
    if sampling == GREEDY:
        assert lint_artifact(artifact) == []  # by the rules of all targets
    executable = get_target("hlo").load(artifact, trust_native_code=True, trust_remote_code=False)
    for deterministic in (False, True):  # every step in the mixed graph
        runner = GraphRunner(executable, artifact.config, artifact.graphs, deterministic=deterministic)
        found, found_logits = generate(runner, PROMPT, 12, sampling, uniforms)
        assert found == expected
        assert (logits - found_logits).abs().max() < NOISE
        assert {name.split("_")[0] for name in runner.graph_calls} == (
            {"mixed"} if deterministic else {"chunked", "token"}
        )


@pytest.mark.parametrize("name", LOWERED)
def test_what_no_token_sees_and_what_a_neighbor_holds_changes_no_bit(
    name: str, hlo_artifact: Callable[[str], Path], tiny_specs: dict[str, ModelSpec]
) -> None:
    runner, spec = artifact_runner(hlo_artifact(name)), tiny_specs[name]
    clean, beside = serve_steps(runner, spec), serve_steps(runner, spec, neighbor=0.0)
    for canary in CANARIES:
        assert same_bits(serve_steps(runner, spec, unseen=canary), clean)
        assert same_bits(serve_steps(runner, spec, neighbor=canary), beside)


@pytest.mark.parametrize(("deterministic", "sampling"), [(False, SAMPLED), (True, GREEDY)])
def test_steps_take_tokens_that_nobody_has_read(
    deterministic: bool,
    sampling: SamplingParams,
    hlo_artifact: Callable[[str], Path],
    sharp_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uniforms = torch.rand(8).tolist()
    expected, _ = generate(
        eager_runner(load_model(sharp_checkpoints["llama"]), tiny_config()), PROMPT, 8, sampling, uniforms
    )
    loaded = artifact_runner(hlo_artifact("llama"))
    runner = GraphRunner(loaded.executable, loaded.config, list(loaded.family), deterministic=deterministic)
    read: list[tuple[int, ...]] = []

    def noted(result: torch.Tensor) -> np.ndarray:
        read.append(tuple(result.shape))
        return to_numpy(result.cpu())

    monkeypatch.setattr(executors, "_to_host", noted)
    # A prompt in rows of its own, the last two in one step; another slot's rows follow and leave its token alone.
    waits = [runner.start_step([PromptPiece(1, PROMPT[:13])], logits=False)]
    waits.append(runner.start_step([PromptPiece(1, PROMPT[13:], sampling, uniforms[0])], logits=False))
    waits.append(runner.start_step([PromptPiece(2, PROMPT[:3])], logits=False))
    for draw in uniforms[1:]:
        waits.append(runner.start_step((), decode_rows(runner, {1: FROM_SLOT}, sampling, draw), logits=False))
    assert read == []
    first = waits[1]().chunk_tokens
    assert first is not None
    found = [int(first[0])]
    for wait in waits[3:]:
        read.clear()
        tokens = wait().decode_tokens
        assert tokens is not None
        found.append(int(tokens[1]))
        groups = [(loaded.config.batch_size,), (loaded.config.ctx_batch_size,)]
        assert read == (groups if deterministic else groups[:1])  # a number per row, once a token
    assert found == expected


def test_an_artifact_that_is_not_trusted_is_lowered_again(hlo_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    trusted = artifact_runner(hlo_artifact("llama"))
    again = artifact_runner(hlo_artifact("llama"), trust_native_code=False)
    assert generate(again, PROMPT, 4)[0] == generate(trusted, PROMPT, 4)[0]


def test_graphs_of_several_ranks_are_not_loaded_as_one(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="hlo", tensor_parallel_size=2)
    for trusted in (True, False):
        with pytest.raises(
            ValueError, match=r"has graphs of 2 ranks, and target='hlo' generates with one; .* --certify"
        ):
            artifact_runner(folder, trust_native_code=trusted)


def test_a_model_that_breaks_a_rule_is_refused_before_anything_is_written(
    sharp_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x).cumprod(-1))
    with pytest.raises(ValueError, match=r"cannot be compiled for hlo: .*layers\.0\.mlp: a reduce-window.*more"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="hlo")
    assert not list(tmp_path.iterdir())


def test_the_shortest_sequences_and_a_slot_alone_are_exported(
    hlo_artifact: Callable[[str], Path], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """With fewer golden tokens, and no graph that copies slots. Nor are slots copied that keep more than rows."""
    assert not list((hlo_artifact("lfm2") / "graphs").glob("copy_slot*"))
    sizes = {"sequence_length": 4, "prefill_chunk_size": 2, "context_buckets": (4,)}
    checkpoint, out = sharp_checkpoints["llama"], tmp_path / "out"
    folder = export_tiny(checkpoint, out, target="hlo", batch_size=1, ctx_batch_size=1, **sizes)
    golden = Golden.read(folder)
    assert len(golden.prompt) == 1 and len(golden.tokens) == 4
    assert {path.stem.split("_")[0] for path in (folder / "graphs").glob("*.hlo")} == {"token", "chunked", "sample"}
    model = NeuronModelForCausalLM.from_pretrained(folder)
    first, second = (model.generate_batch([PROMPT[:2].tolist()], max_new_tokens=2).values() for _ in range(2))
    assert [each.generated_tokens for each in first] == [each.generated_tokens for each in second]
