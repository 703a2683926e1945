# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs: the same bytes every time, every parameter named and described, states updated in place, 32-bit types."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    CHUNK_SIZE,
    VOCAB,
    eager_runner,
    generate,
    load_model,
    python_process,
    random_tokens,
    tiny_config,
)
from lowered import lower_function, lower_model
from torch import Tensor, nn

from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.rows import AttentionRows
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import EAGER_OPS
from optimum_neuron.step.spec import SamplingParams, graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule
from optimum_neuron.targets.eager import EagerExecutable
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import GraphIO, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.canonical import remove_unused
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS, write_cache


# Of logits between -1 and 1, by other orders of summation in float32.
NOISE = 1e-6
SAMPLED = SamplingParams(20, 0.9, 0.8)
LOWER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from helpers import load_model, tiny_config
from lowered import lower_model
for graph in lower_model(load_model(Path(sys.argv[1])), tiny_config(target="hlo", mixed_step=False)):
    print(graph.name, graph.io.hlo_sha256)
"""


@pytest.fixture(scope="module")
def graphs(tiny_models: dict[str, nn.Module]) -> dict[str, LoweredGraph]:
    return {graph.name: graph for graph in lower_model(tiny_models["llama"], tiny_config(target="hlo"))}


def test_every_graph_is_lowered_and_one_that_copies_slots(graphs: dict[str, LoweredGraph]) -> None:
    assert sorted(graph.kind for graph in graphs.values()) == [
        "chunked_prefill",
        "copy_slot",
        "mixed",
        "sample_chunk",
        "sample_decode",
        "token_generation",
    ]


def test_bytes_depend_on_the_graph_alone(
    graphs: dict[str, LoweredGraph],
    tiny_models: dict[str, nn.Module],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not on the process, its hashes and its folder, nor on the checkpoint's folder and weights, so that what compiled them once is found."""
    lower_function(torch.sin, [torch.ones(3)])  # torch-xla's counters have moved on
    again = lower_model(tiny_models["llama"], tiny_config(target="hlo", mixed_step=False))
    for graph in again:
        assert graph.hlo == graphs[graph.name].hlo
    helpers = Path(__file__).parents[3] / "helpers"
    monkeypatch.chdir(tmp_path)
    other_weights = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere")
    process = python_process(LOWER, other_weights, helpers, PYTHONHASHSEED="1234")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.splitlines() == [f"{graph.name} {graph.io.hlo_sha256}" for graph in again]


def test_bytes_name_no_file_of_this_machine(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        assert hashlib.sha256(graph.hlo).hexdigest() == graph.io.hlo_sha256
        assert b".py" not in graph.hlo and b"site-packages" not in graph.hlo


def test_parameters_are_the_described_ones_under_their_own_names(
    graphs: dict[str, LoweredGraph], tiny_specs: dict[str, ModelSpec]
) -> None:
    config = tiny_config(target="hlo")
    states = tuple(state.name for state in state_specs(config, tiny_specs["llama"]))
    for spec in graph_specs(config):
        io = graphs[spec.name].io
        assert [
            (each.name, tuple(each.shape.dimensions), hlo.dtype_name(each.shape))
            for each in hlo.parameters(hlo.parse(graphs[spec.name].hlo))
        ] == [(each.name, each.shape, each.dtype) for each in io.inputs]
        sampled = {each for group in ("decode", "chunk") for each in (f"{group}.sampling_params", f"{group}.uniforms")}
        assert io.names("input") == tuple(each.name for each in spec.inputs() if each.name not in sampled)
        scores = ("scores.decode",) * spec.has_decode + ("scores.chunk",) * spec.has_chunk
        scores += ("chosen.tokens",)
        assert io.names("state") == states + scores
        outputs = spec.outputs(VOCAB)
        assert [(each.name, each.shape, each.dtype) for each in io.outputs[: len(outputs)]] == [
            (each.name, each.shape, each.dtype) for each in outputs
        ]
        assert tuple(each.alias_of for each in io.outputs[len(outputs) :]) == states + scores
        assert GraphIO.from_dict(json.loads(json.dumps(io.to_dict()))) == io


def test_inputs_that_nothing_needs_are_recorded(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        groups = ["decode"] * (graph.kind in ("token_generation", "mixed"))
        groups += ["chunk"] * (graph.kind in ("chunked_prefill", "mixed"))
        sampled = [f"{group}.{each}" for group in groups for each in ("sampling_params", "uniforms")]
        weights = ["model.model.rotary_emb.original_inv_freq"] * bool(groups)
        assert sorted(graph.io.unused_inputs) == sorted([*weights, *sampled])


def test_the_compiled_graphs_tensors_will_have_these_names(graphs: dict[str, LoweredGraph]) -> None:
    graph = graphs["copy_slot"]
    module = hlo.parse(graph.hlo)
    root = next(each for each in hlo.entry(module).instructions if each.id == hlo.entry(module).root_id)
    named = [
        (each.frontend_attributes.map[0].key, each.frontend_attributes.map[0].value) for each in hlo.parameters(module)
    ]
    assert named == [("neff_input_names", f"input{index}") for index in range(len(graph.io.inputs))]
    assert root.frontend_attributes.map[0].key == "neff_output_names"
    assert root.frontend_attributes.map[0].value == ",".join(f"output{index}" for index in range(4))


def test_states_are_aliased_to_their_new_values(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        module = hlo.parse(graph.hlo)
        position = {binding.name: index for index, binding in enumerate(graph.io.inputs)}
        assert [
            (entry.output_shape_index[0], entry.parameter_number, entry.kind)
            for entry in module.input_output_alias.entries
        ] == [
            (index, position[output.alias_of], hlo.MUST_ALIAS)
            for index, output in enumerate(graph.io.outputs)
            if output.alias_of is not None
        ]


def test_no_graph_has_a_64_bit_type(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        types = {hlo.dtype_name(each.shape) for _, each in hlo.instructions(hlo.parse(graph.hlo))}
        assert not types & {"int64", "uint64", "float64"}


def test_instructions_know_their_module(graphs: dict[str, LoweredGraph]) -> None:
    module = hlo.parse(graphs["token_generation_context64"].hlo)
    paths = {hlo.module_path(each) for _, each in hlo.instructions(module) if each.opcode == "dot"}
    assert {"model.model.layers.1.self_attn.q_proj", "model.model.layers.0.mlp.down_proj", "model.lm_head"} <= paths


def test_the_head_is_computed_for_the_rows_that_are_returned(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        heads = [
            tuple(each.shape.dimensions)
            for _, each in hlo.instructions(hlo.parse(graph.hlo))
            if each.opcode == "dot" and hlo.module_path(each) == "model.lm_head"
        ]
        rows = {"token_generation": 3, "chunked_prefill": 2, "mixed": 5}
        assert heads == ([(rows[graph.kind], VOCAB)] if graph.kind in rows else [])


def test_a_constant_too_large_for_int32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"constant 4294967296 .* does not fit int32"):
        lower_function(lambda x: x.long() + 2**32, [torch.ones(3, dtype=torch.int32)])


def test_passes_keep_the_values_of_constants() -> None:
    graph = lower_function(lambda x: x + torch.tensor([0.5, -2.0]), [torch.ones(2)])
    literals = [
        list(each.literal.f32s) for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode == "constant"
    ]
    assert [0.5, -2.0] in literals
    graph = lower_function(lambda x: x + torch.tensor([0.5, -2.0], dtype=torch.bfloat16), [torch.ones(2).bfloat16()])
    packed = [each.literal.bf16s for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.literal.bf16s]
    assert torch.tensor([0.5, -2.0]).bfloat16().view(torch.int16).numpy().tobytes() in packed


def test_names_that_are_no_identifiers_stay_apart(graphs: dict[str, LoweredGraph]) -> None:
    for graph in graphs.values():
        module = hlo.parse(graph.hlo)
        names = [each.name for _, each in hlo.instructions(module)]
        ids = [each.id for _, each in hlo.instructions(module)] + [each.id for each in module.computations]
        assert len(set(names)) == len(names) and sorted(ids) == list(range(1, len(ids) + 1))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_neuron_operators_equal_the_reference_within_noise(name: str, sharp_checkpoints: dict[str, Path]) -> None:
    model = load_model(sharp_checkpoints[name])
    reference = eager_runner(model, tiny_config())
    other = load_model(sharp_checkpoints[name])
    config = tiny_config()
    cache, specs = KVCache(state_specs(config, inspect_model(other))), graph_specs(config)
    ops = dataclasses.replace(NEURON_OPS, sample=EAGER_OPS.sample)
    steps = {spec.name: StepModule(other, cache, spec, ops).eval() for spec in specs}
    runner = GraphRunner(EagerExecutable(steps, cache), config, specs)
    uniforms = torch.rand(8).tolist()
    prompt = random_tokens(3 * CHUNK_SIZE - 3)
    expected, logits = generate(reference, prompt, 8, SAMPLED, uniforms)
    found, other_logits = generate(runner, prompt, 8, SAMPLED, uniforms)
    assert found == expected
    assert (logits - other_logits).abs().max() < NOISE


def test_the_neuron_cache_write_is_the_reference_write() -> None:
    rows, columns = torch.tensor([0, 2, 3, 3], dtype=torch.int32), torch.tensor([5, 0, 1, 7], dtype=torch.int32)
    states = torch.randn(4, 2, 16)
    caches = torch.zeros(2, 4, 2, 8, 16)
    from optimum_neuron.step.attention.kv_cache import write_tokens

    write_tokens(caches[0], states, rows, columns)
    write_cache(caches[1], states, rows, columns)
    assert torch.equal(caches[0], caches[1]) and caches[0].any()


def test_a_window_is_part_of_the_mask() -> None:
    rows = AttentionRows(torch.tensor([[9]], dtype=torch.int32), None, 16)
    assert rows.visible(4).nonzero()[:, 2].tolist() == [6, 7, 8, 9]


def test_what_a_model_computes_beside_its_states_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    from optimum_neuron.step.spec import TensorSpec
    from optimum_neuron.targets.neuron.lowering.lower import lower_program

    program = decompose(torch.export.export(Counter(), (torch.ones(1),), strict=False))
    with pytest.raises(ValueError, match="must update the cache's states once and nothing else; it differs in count"):
        lower_program(program, "g", "g", [TensorSpec("x", (1,), "float32")], [TensorSpec("y", (1,), "float32")], 1)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.amax, lambda x: x.mean(0), lambda x: x.any()])
def test_reductions_have_the_shape_that_torch_gives_them(reduce: Callable[[Tensor], Tensor]) -> None:
    graph = lower_function(reduce, [torch.rand(4, 3)])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")


def test_infinite_masks_become_finite() -> None:
    graph = lower_function(lambda x: torch.where(x > 0, x, torch.full_like(x, -torch.inf)), [torch.ones(2, 3)])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")
    literals = [value for _, each in hlo.instructions(hlo.parse(graph.hlo)) for value in each.literal.f32s]
    assert torch.tensor(literals).isfinite().all() and min(literals) == torch.finfo(torch.float32).min


def test_unused_computations_disappear() -> None:
    graph = lower_function(lambda x: (x.amax(), x.sum())[1], [torch.ones(4)])
    module = hlo.parse(graph.hlo)
    remove_unused(module)
    assert hlo.serialize(module) == graph.hlo and len(module.computations) == 2
