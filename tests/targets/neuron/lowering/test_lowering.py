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
import torch_xla
from helpers import VOCAB, python_process, tiny_config
from lowered import lower_function, lower_model
from torch import Tensor, nn
from torch_xla.core import xla_model as xm

from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import TensorSpec, graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import GraphIO, LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering import xla_trace
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.lower import lower_program
from optimum_neuron.targets.neuron.operators.collectives import all_gather


LOWER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from helpers import load_model, tiny_config
from lowered import lower_model
for graph in lower_model(load_model(Path(sys.argv[1])), tiny_config(target="hlo"), ["token_generation", "copy_slot"]):
    print(graph.name, graph.io.hlo_sha256)
"""


GROUPS = {"groups": [[0, 1]], "pin_layout": False}
BEGINNINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "all-reduce": lambda x: torch_xla._XLAC._xla_all_reduce("sum", x, 1.0, [[0, 1]], False),
    "reduce-scatter": lambda x: xm.reduce_scatter("sum", x, 1.0, 0, 2, **GROUPS),
    "all-to-all": lambda x: xm.all_to_all(x, 0, 0, 2, **GROUPS),
    "collective-permute": lambda x: xm.collective_permute(x, [[0, 1], [1, 0]]),
}


@pytest.fixture(scope="module")
def graphs(tiny_models: dict[str, nn.Module]) -> dict[str, LoweredGraph]:
    return {graph.name: graph for graph in lower_model(tiny_models["llama"], tiny_config(target="hlo"))}


def test_bytes_depend_on_the_graph_alone(
    graphs: dict[str, LoweredGraph],
    tiny_models: dict[str, nn.Module],
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not on the process, its hashes and its folder, nor on the checkpoint's folder and weights, so that what compiled them once is found."""
    lower_function(torch.sin, [torch.ones(3)])  # torch-xla's counters have moved on
    again = lower_model(tiny_models["llama"], tiny_config(target="hlo"), ["token_generation", "copy_slot"])
    assert len(again) == 2
    for graph in again:
        assert graph.hlo == graphs[graph.name].hlo
    helpers = Path(__file__).parents[3] / "helpers"
    monkeypatch.chdir(tmp_path)
    other_weights = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere")
    process = python_process(LOWER, other_weights, helpers, PYTHONHASHSEED="1234")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.splitlines() == [f"{graph.name} {graph.io.hlo_sha256}" for graph in again]


def test_every_graph_is_lowered_in_32_bits_with_ids_and_names_of_its_own_and_no_file_of_this_machine(
    graphs: dict[str, LoweredGraph],
) -> None:
    steps, others = ["chunked_prefill", "mixed", "token_generation"], ["copy_slot", "sample_chunk", "sample_decode"]
    assert sorted(graph.kind for graph in graphs.values()) == sorted([*steps, *others])
    for graph in graphs.values():
        assert hashlib.sha256(graph.hlo).hexdigest() == graph.io.hlo_sha256
        assert b".py" not in graph.hlo and b"site-packages" not in graph.hlo
        module = hlo.parse(graph.hlo)
        instructions = [each for _, each in hlo.instructions(module)]
        ids = [each.id for each in (*instructions, *module.computations)]
        assert len({each.name for each in instructions}) == len(instructions)
        assert sorted(ids) == list(range(1, len(ids) + 1))
        assert not {hlo.dtype_name(each.shape) for each in instructions} & {"int64", "uint64", "float64"}
        # States are aliased to their new values.
        position = {binding.name: index for index, binding in enumerate(graph.io.inputs)}
        aliases = [(index, each.alias_of) for index, each in enumerate(graph.io.outputs) if each.alias_of is not None]
        assert [
            (entry.output_shape_index[0], entry.parameter_number, entry.kind)
            for entry in module.input_output_alias.entries
        ] == [(index, position[alias], hlo.MUST_ALIAS) for index, alias in aliases]
        # The head is computed for the rows that are returned.
        heads = [each for each in instructions if each.opcode == "dot" and hlo.module_path(each) == "model.lm_head"]
        rows = {"token_generation": 3, "chunked_prefill": 2, "mixed": 5}
        shapes = [tuple(each.shape.dimensions) for each in heads]
        assert shapes == ([(rows[graph.kind], VOCAB)] if graph.kind in rows else [])
        paths = {hlo.module_path(each) for each in instructions if each.opcode == "dot"}
        layers = {"model.model.layers.1.self_attn.q_proj", "model.model.layers.0.mlp.down_proj"}
        assert layers <= paths or graph.kind in others
        # A step has no search for a token's weight.
        assert "floor" not in {each.opcode for each in instructions} or graph.kind in others


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
        # Inputs that nothing needs are left out, and recorded.
        sampled = [each.name for each in spec.inputs() if each.name.endswith((".sampling_params", ".uniforms"))]
        assert io.names("input") == tuple(each.name for each in spec.inputs() if each.name not in sampled)
        assert sorted(io.unused_inputs) == sorted([*sampled, "model.model.rotary_emb.original_inv_freq"])
        scores = ("scores.decode",) * spec.has_decode + ("scores.chunk",) * spec.has_chunk
        scores += ("chosen.tokens",)
        assert io.names("state") == states + scores
        outputs = spec.outputs(VOCAB)
        assert [(each.name, each.shape, each.dtype) for each in io.outputs[: len(outputs)]] == [
            (each.name, each.shape, each.dtype) for each in outputs
        ]
        assert tuple(each.alias_of for each in io.outputs[len(outputs) :]) == states + scores
        assert GraphIO.from_dict(json.loads(json.dumps(dataclasses.asdict(io)))) == io


def test_the_compiled_graphs_tensors_will_have_these_names(graphs: dict[str, LoweredGraph]) -> None:
    graph = graphs["copy_slot"]
    module = hlo.parse(graph.hlo)
    attributes = [each.frontend_attributes.map[0] for each in hlo.parameters(module)]
    named = [(each.key, each.value) for each in attributes]
    assert named == [("neff_input_names", f"input{index}") for index in range(len(graph.io.inputs))]
    root = hlo.find_root(hlo.entry(module)).frontend_attributes.map[0]
    assert (root.key, root.value) == ("neff_output_names", ",".join(f"output{index}" for index in range(4)))


def test_a_constant_too_large_for_int32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"constant 4294967296 .* does not fit int32"):
        lower_function(lambda x: x.long() + 2**32, [torch.ones(3, dtype=torch.int32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_keep_the_values_of_constants(dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, -2.0], dtype=dtype)
    graph = lower_function(lambda x: x + torch.tensor([0.5, -2.0], dtype=dtype), [torch.ones(2, dtype=dtype)])
    constants = [each for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode == "constant"]
    assert values.tolist() in [list(hlo.literal_values(each)) for each in constants]


def test_what_a_model_computes_beside_its_states_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    program = decompose(torch.export.export(Counter(), (torch.ones(1),), strict=False))
    with pytest.raises(ValueError, match="must update the cache's states once and nothing else; it differs in count"):
        lower_program(program, "g", "g", [TensorSpec("x", (1,), "float32")], [TensorSpec("y", (1,), "float32")], 1)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.amax, lambda x: x.mean(0), lambda x: x.any()])
def test_reductions_have_the_shape_that_torch_gives_them(reduce: Callable[[Tensor], Tensor]) -> None:
    graph = lower_function(reduce, [torch.rand(4, 3)])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")


def test_transposes_to_the_same_order_disappear() -> None:
    for order, expected in (((0, 1, 2), 0), ((0, 2, 1), 1)):
        graph = lower_function(lambda x, order=order: x.permute(order) + 1, [torch.ones(2, 3, 4)])
        module = hlo.parse(graph.hlo)
        assert [each.opcode for _, each in hlo.instructions(module)].count("transpose") == expected


@pytest.mark.parametrize("opcode", ["all-gather", *BEGINNINGS])
def test_no_collective_waits_for_one_that_it_takes_nothing_from(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gather = iter([BEGINNINGS.get(opcode)]), xla_trace._Tracer._gather_along

    def gather_or_begin(tracer: xla_trace._Tracer, own: Tensor, dim: int) -> Tensor:
        begin = next(calls, None)
        return gather(tracer, own, dim) if begin is None else begin(own)

    monkeypatch.setattr(xla_trace._Tracer, "_gather_along", gather_or_begin)
    three = [lambda x, scale=scale: all_gather(x * scale, 0, 2).sum() for scale in (2.0, 3.0, 5.0)]
    graph = lower_function(lambda x: sum(each(x) for each in three), [torch.ones(4, 3)], 2)
    instructions = {each.id: each for _, each in hlo.instructions(hlo.parse(graph.hlo))}
    found = [each for each in instructions.values() if each.opcode in hlo.COLLECTIVES]
    assert [each.opcode for each in found] == [opcode, "all-gather", "all-gather"]
    for each in found:  # it takes a product of the parameter
        sources = [instructions[operand].opcode for operand in instructions[each.operand_ids[0]].operand_ids]
        assert sorted(sources) == ["broadcast", "parameter"]
    assert "order-token" not in {each.rule for each in lint(graph.name, graph.hlo, graph.io, "trn2")}


def test_infinite_masks_become_finite_and_unused_computations_disappear() -> None:
    graph = lower_function(lambda x: (x.amax(), x.sum())[1], [torch.ones(4)])
    assert len(hlo.parse(graph.hlo).computations) == 2
    graph = lower_function(lambda x: torch.where(x > 0, x, torch.full_like(x, -torch.inf)), [torch.ones(2, 3)])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")
    literals = [value for _, each in hlo.instructions(hlo.parse(graph.hlo)) for value in each.literal.f32s]
    assert torch.tensor(literals).isfinite().all() and min(literals) == torch.finfo(torch.float32).min
