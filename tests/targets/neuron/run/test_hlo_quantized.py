# SPDX-License-Identifier: Apache-2.0
"""Quantized weights in graphs of HLO: what they compute, with what in memory, and that ranks share codes with their scales."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import artifact_runner, as_tensor, generate, prefill_pieces
from moe import make_checkpoint
from quantized import quantize_experts, quantize_mixed
from quantized_files import change_config, change_weights, dequantized_model
from torch import Tensor

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.artifact.quantization import read_formats
from optimum_neuron.artifact.tensor_file import stored_tensors
from optimum_neuron.artifact.weights import rank_weights_name
from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import PromptPiece
from optimum_neuron.export import recipe as export
from optimum_neuron.export.recipe import export_model
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.lint import artifact_graphs, lint_artifact
from optimum_neuron.tools.certify import certify_export


# Groups of 16: a decode step of 2 rows adds up their products, a chunk step scales the weight.
SIZES: dict[str, Any] = {
    "batch_size": 2, "ctx_batch_size": 2, "sequence_length": 96, "prefill_chunk_size": 16, "mixed_step": False, "output_logits": True,
    "dtype": "float32", "quantization": "int8",
}  # fmt: skip
PROMPT = np.random.default_rng(0).integers(3, 300, 41, dtype=np.int32)


@pytest.fixture(scope="module")
def mixed(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Artifacts of a Llama with weights of all forms, by target and ranks."""
    made: dict[tuple[str, int], Path] = {}

    def make(target: str, ranks: int = 1) -> Path:
        if (target, ranks) not in made:
            output = tmp_path_factory.mktemp("mixed") / "artifact"
            config = NeuronConfig.from_dict({**SIZES, "target": target, "tensor_parallel_size": ranks})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(export, "quantize", quantize_mixed)
                certify = certify_export if ranks > 1 else None
                made[target, ranks] = export_model(sharp_checkpoints["llama"], output, config=config, certify=certify)
        return made[target, ranks]

    return make


def test_logits_are_those_of_the_dequantized_weights_and_tokens_those_of_the_eager_target(
    mixed: Callable[..., Path],
) -> None:
    ids = torch.from_numpy(PROMPT)[None].long()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    lowered, eager = (
        NeuronModelForCausalLM.from_pretrained(mixed(each)).generate(ids, **options) for each in ("hlo", "eager")
    )
    assert torch.equal(lowered.sequences, eager.sequences)
    peer, kinds = dequantized_model(mixed("eager"))
    assert kinds == {"int8", "int4", "fp8", "fp4"}
    with torch.no_grad():
        expected = peer(lowered.sequences[:, :-1]).logits[:, -6:]
    difference = (torch.stack(lowered.logits, 1) - expected).abs().amax()
    assert difference < 1e-5 * (expected.amax() - expected.amin())


def test_experts_compute_with_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode row gathers codes of its experts; in a chunk all experts compute all tokens, and weights of groups are scaled."""
    checkpoint = make_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    monkeypatch.setattr(export, "quantize", quantize_experts)
    sizes = {**SIZES, "batch_size": 1, "ctx_batch_size": 1, "sequence_length": 256, "prefill_chunk_size": 128}
    found = {}
    for target in ("eager", "hlo"):
        config = NeuronConfig.from_dict({**sizes, "target": target})
        export_model(checkpoint, tmp_path / target, config=config)
        found[target] = generate(artifact_runner(tmp_path / target), PROMPT, 6)
    assert found["hlo"][0] == found["eager"][0]
    assert (found["hlo"][1] - found["eager"][1]).abs().amax() < 2e-5
    artifact = Artifact.open(tmp_path / "hlo")
    assert lint_artifact(artifact) == []
    names = stored_tensors(artifact.file(WEIGHTS_NAME)).keys()
    assert "model.model.layers.0.mlp.experts.gate_up_proj_codes.order_0_2_1_halves_1" in names
    assert "model.model.layers.1.mlp.experts.down_proj_scale.order_0_2_1" in names
    gathered = [
        each
        for name, data, _ in artifact_graphs(artifact)
        if name.startswith("token")
        for _, each in hlo.instructions(hlo.parse(data))
        if each.opcode == "gather" and hlo.dtype_name(each.shape) in ("int8", "uint8")
    ]
    assert len(gathered) == 4


def test_cuts_slots_and_neighbours_change_no_bit(mixed: Callable[..., Path]) -> None:
    runner = artifact_runner(mixed("hlo"))
    alone: Tensor | None = None
    for slot, pieces in enumerate([[16, 16, 9], [7, 13, 5, 16]]):
        logits = prefill_pieces(runner, slot, PROMPT, pieces)
        alone = logits if alone is None else alone
        assert torch.equal(logits, alone)
    runner.reset_slots()
    other = np.random.default_rng(1).integers(3, 300, 41, dtype=np.int32)
    for start in range(0, 41, 16):
        step = runner.run_step([PromptPiece(0, other[start : start + 16]), PromptPiece(1, PROMPT[start : start + 16])])
    assert step.chunk_logits is not None and alone is not None
    assert torch.equal(as_tensor(step.chunk_logits[1]), alone)


def test_weights_lie_as_products_take_them(mixed: Callable[..., Path]) -> None:
    """Joined where one product takes them, inputs first; no graph transposes one, or keeps a copy of 16 bits of it."""
    artifact = Artifact.open(mixed("hlo"))
    tensors = stored_tensors(artifact.file(WEIGHTS_NAME))
    found = {name: (tuple(each.shape), each.dtype.name) for name, each in tensors.items() if ".layers.0." in name}
    attention, mlp = "model.model.layers.0.self_attn.", "model.model.layers.0.mlp."
    assert found[attention + "q_proj-k_proj.codes.order_1_0_halves_1"] == ((32, 64 + 32), "uint8")
    assert found[attention + "q_proj-k_proj.scale.order_1_0"] == ((4, 64 + 32), "float16")
    assert found[attention + "v_proj.codes.order_1_0"] == ((64, 32), "float8_e4m3fn")
    assert found[mlp + "gate_proj-up_proj.codes.order_1_0"] == ((64, 192), "float8_e4m3fn")
    assert found[mlp + "down_proj.shift.order_1_0"] == ((6, 64), "float32")
    assert not any(name.endswith(("codes", "scale", "shift", "proj.weight")) for name in tensors)
    assert lint_artifact(artifact) == []


def test_ranks_share_codes_and_scales(mixed: Callable[..., Path]) -> None:
    """The certificate of the export executes both ranks beside the model."""
    artifact = Artifact.open(mixed("hlo", 2))
    parts = [stored_tensors(artifact.file(rank_weights_name(rank, 2))) for rank in range(2)]
    assert parts[0].keys() == parts[1].keys()
    shapes = {
        name.partition(".layers.0.")[2]: tuple(each.shape) for name, each in parts[0].items() if ".layers.0." in name
    }
    assert shapes["self_attn.q_proj-k_proj.codes.order_1_0_halves_1"] == (32, 32 + 16)
    assert shapes["self_attn.o_proj.codes.order_1_0"] == (32, 64)
    assert shapes["self_attn.o_proj.scale.order_1_0"] == (1, 64)
    assert shapes["mlp.down_proj.codes.order_1_0_halves_3"] == (24, 64)  # an odd number of groups
    assert shapes["mlp.down_proj.scale.order_1_0"] == (3, 64)


@pytest.mark.full
def test_a_table_of_codes_that_the_head_shares_is_gathered_and_multiplied_by_ranks(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = Path(shutil.copytree(sharp_checkpoints["llama"], tmp_path / "tied"))
    change_config(checkpoint, tie_word_embeddings=True)
    change_weights(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    found: dict[str, tuple[list[int], Tensor]] = {}
    for name, target, ranks in (("eager", "eager", 1), ("alone", "hlo", 1), ("shared", "hlo", 2)):
        config = NeuronConfig.from_dict({**SIZES, "target": target, "tensor_parallel_size": ranks})
        # That of ranks executes each beside the model.
        export_model(checkpoint, tmp_path / name, config=config, certify=certify_export if ranks > 1 else None)
        if ranks == 1:
            found[name] = generate(artifact_runner(tmp_path / name), PROMPT, 6)
    formats = read_formats(tmp_path / "shared")
    assert formats["model.embed_tokens"].kind == "int8" == formats["lm_head"].kind
    (tokens, logits), (expected_tokens, expected) = found["alone"], found["eager"]
    assert tokens == expected_tokens
    assert (logits - expected).abs().amax() < 1e-5 * (expected.amax() - expected.amin())
