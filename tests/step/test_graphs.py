# SPDX-License-Identifier: Apache-2.0
"""Step graphs equal transformers, whatever the prompt's length and the graph's kind; other models are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    LENGTH,
    TRASH_ROW,
    VOCAB,
    Opener,
    examples,
    generate,
    load_model,
    mixed_spec,
    random_tokens,
    step_inputs,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, XLNetConfig

from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.rows import actual_tokens_mask
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import StepOps
from optimum_neuron.step.program import export_graph
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule


@pytest.fixture(scope="module")
def references(sharp_checkpoints: dict[str, Path]) -> dict[str, nn.Module]:
    """transformers' own eager attention, as far from the graphs' as it can be."""
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for name, folder in sharp_checkpoints.items()
    }


@pytest.mark.parametrize("length", [1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 1, LENGTH - 1])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_transformers(
    open_runner: Opener, references: dict[str, nn.Module], name: str, length: int
) -> None:
    prompt = random_tokens(length, seed=length)
    tokens, logits = generate(open_runner(name), prompt, min(12, LENGTH - length + 1))
    ids = torch.tensor([*prompt, *tokens[:-1]])[None]
    with torch.no_grad():
        expected = references[name](ids).logits[0, length - 1 :]
    assert (logits - expected).abs().max() < 1e-5
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_context_buckets_and_unused_chunk_rows_change_no_tokens(open_runner: Opener, name: str) -> None:
    prompt = random_tokens(10)
    tokens, logits = generate(open_runner(name), prompt, 20)
    for changes in ({"context_buckets": (8, 16, LENGTH)}, {"ctx_batch_size": 1}):
        runner = open_runner(name, **changes)
        found, found_logits = generate(runner, prompt, 20)
        assert found == tokens and (found_logits - logits).abs().max() < 1e-5
        contexts = {call.rpartition("context")[2] for call in runner.graph_calls if call.startswith("token")}
        assert contexts == ({"16", str(LENGTH)} if "context_buckets" in changes else {str(LENGTH)})


@given(st.integers(0, 40), st.integers(0, CHUNK_SIZE), st.integers(1, 3))
def test_actual_tokens_are_those_whose_position_rises(start: int, count: int, rows: int) -> None:
    columns = torch.arange(CHUNK_SIZE).clamp(max=count - 1)
    positions = (start + columns if count else torch.full((CHUNK_SIZE,), -1)).to(torch.int32)
    mask = actual_tokens_mask(positions.expand(rows, -1))
    assert mask.tolist() == [[column < count for column in range(CHUNK_SIZE)]] * rows


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, np.ndarray]]]:
    """Any mixed step: each slot is idle, decodes, or takes a chunk, at most two of them."""
    kinds = draw(
        st.lists(st.sampled_from(["idle", "decode", "chunk"]), min_size=3, max_size=3).filter(
            lambda kinds: kinds.count("chunk") < 3
        )
    )
    decode, chunks = {}, {}
    for slot, kind in enumerate(kinds):
        if kind == "decode":
            decode[slot] = (draw(st.integers(0, LENGTH - 1)), 7)
        elif kind == "chunk":
            count = draw(st.integers(1, CHUNK_SIZE))
            chunks[slot] = (draw(st.integers(0, LENGTH - count)), random_tokens(count))
    return decode, chunks


def test_no_step_writes_a_cache_cell_twice(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec]
) -> None:
    config, spec = tiny_config(), mixed_spec(tiny_config())
    writes: list[list[tuple[int, int]]] = []

    def record(cache: Tensor, states: Tensor, rows: Tensor, columns: Tensor) -> None:
        writes.append(list(zip(rows.tolist(), columns.tolist(), strict=True)))

    cache = KVCache(state_specs(config, tiny_specs["llama"]))
    module = StepModule(tiny_models["llama"], cache, spec, StepOps(write_cache=record))

    @examples(40)
    @given(steps())
    def check(planned: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, np.ndarray]]]) -> None:
        decode, chunks = planned
        writes.clear()
        with torch.no_grad():
            module(*step_inputs(spec, decode, chunks))
        live = {(slot, position) for slot, (position, _) in decode.items()}
        live |= {(slot, start + i) for slot, (start, tokens) in chunks.items() for i in range(len(tokens))}
        assert len(writes) == 4
        for cells in writes:
            assert len(set(cells)) == len(cells) == 3 + 2 * CHUNK_SIZE
            assert {cell for cell in cells if cell[0] != TRASH_ROW} == live

    check()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in ("gemma2", "qwen3"))) for name in ARCHITECTURES]
)
def test_every_input_and_state_of_an_exported_graph_is_used(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec], name: str
) -> None:
    config = tiny_config()
    program = export_graph(tiny_models[name], KVCache(state_specs(config, tiny_specs[name])), mixed_spec(config))
    signature = program.graph_signature
    weights = signature.inputs_to_parameters | signature.inputs_to_buffers
    unused = {
        weights.get(node.name, node.name)
        for node in program.graph.nodes
        if node.op == "placeholder" and not node.users
    }
    tied = {"model.model.embed_tokens.weight"} if tiny_models[name].config.tie_word_embeddings else set()
    assert unused <= tied | {"model.model.rotary_emb.original_inv_freq"}
    assert {state.name for state in state_specs(config, tiny_specs[name])} <= set(weights.values())


def test_an_input_that_a_graph_would_ignore_stops_the_export(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec]
) -> None:
    config = tiny_config()
    cache = KVCache(state_specs(config, tiny_specs["llama"]))
    ops = StepOps(sample=lambda logits, params, uniforms: logits[:, 0] + params[:, 0])
    with pytest.raises(RuntimeError, match=r"graph token_generation_context64: input decode.uniforms has no user"):
        export_graph(tiny_models["llama"], cache, graph_specs(config)[0], ops)


def test_a_model_is_asked_for_its_own_sizes(tiny_specs: dict[str, ModelSpec]) -> None:
    for name in ARCHITECTURES:
        sizes = (4, 24, 12) if name == "deepseek_v3" else (2, 16, 16)
        states = KeyValueState(0, *sizes), KeyValueState(1, *sizes)
        assert tiny_specs[name] == ModelSpec(VOCAB, states, num_embeddings=VOCAB)


def test_a_model_without_the_attention_interface_or_with_one_foreign_layer_is_refused(tiny_checkpoint: Path) -> None:
    own = XLNetConfig(d_model=32, d_inner=32, n_layer=2, n_head=2, vocab_size=100)
    with pytest.raises(ValueError, match=r"XLNetLMHeadModel cannot be exported: 0 attention .* num_hidden_layers=2"):
        inspect_model(AutoModelForCausalLM.from_config(own))

    class OwnAttention(nn.Module):
        def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            return hidden_states, None

    model = load_model(tiny_checkpoint)
    model.get_submodule("model.layers.1").self_attn = OwnAttention()
    with pytest.raises(ValueError, match="1 attention calls were seen for num_hidden_layers=2"):
        inspect_model(model)
