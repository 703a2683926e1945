# SPDX-License-Identifier: Apache-2.0
"""Estimates against what they estimate: bytes written and allocated, operations counted, times published."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, artifact_runner, export_tiny, load_model, tiny_config
from safetensors.torch import load_file
from selecting import CONFIGS as SELECTING
from sharded_ranks import make_model
from tiny import TINY_CONFIGS, TINY_SIZES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
    RwkvConfig,
    T5Config,
)

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule, example_inputs
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS
from optimum_neuron.targets.neuron.operators import attention
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS, chip_of
from optimum_neuron.targets.neuron.sharding import apply_plan, shard_plan, write_sharded_weights
from optimum_neuron.targets.neuron.sharding.trace import data_free_copy, no_data
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.estimate import estimate_model
from optimum_neuron.tools.estimate.model_sizes import ModelSizes, measure_model
from optimum_neuron.tools.estimate.step_needs import cache_bytes, live_bytes
from optimum_neuron.tools.estimate.step_speed import (
    count_flops,
    expert_work,
    routed_flops,
    step_work,
    weight_bytes_read,
)


TINY = TINY_SIZES | {"num_hidden_layers": 3}
# Beside the architectures of all tests: tied embeddings, fused projections and positions in a table.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "tied": lambda: LlamaConfig(**TINY, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4),
    "phi3": lambda: Phi3Config(**TINY),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=256),
}
NAMES = tuple(dict.fromkeys((*ARCHITECTURES, "lfm2", *CONFIGS)))


def sized(config: PreTrainedConfig, dtype: str = "bfloat16") -> ModelSizes:
    return measure_model(AutoConfig.for_model(**config.to_dict()), config.model_type, dtype, trust_remote_code=False)


def test_what_no_graph_can_contain_is_not_estimated(tmp_path: Path) -> None:
    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}
    config = DbrxConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=300, attn_config=attention, ffn_config=experts)
    with pytest.raises(ValueError, match=r"DbrxForCausalLM decides by the values of tensors .*nonzero"):
        measure_model(config, "dbrx", "bfloat16", trust_remote_code=False)
    for stranger, told in ((T5Config(), "encoder-decoder"), (RwkvConfig(num_hidden_layers=2), "RwkvForCausalLM")):
        stranger.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=told):
            estimate_model(str(tmp_path), {}, ["trn2"])


def tensor_bytes(path: Path, sizes: ModelSizes) -> int:
    """Of a file, and of the other form of an embedding that is also the head, which files for Neuron have."""
    twice = {weight.name for weight in sizes.weights if weight.also_table}
    return sum(tensor.nbytes * (1 + (name in twice)) for name, tensor in load_file(path).items())


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random float32 checkpoints by architecture."""
    folders = dict(tiny_checkpoints)
    for name, config in CONFIGS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_cache_are_those_of_an_artifact(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    dtype = "bfloat16"
    path = export_tiny(checkpoints[name], tmp_path / "artifact", dtype=dtype)
    (one,) = estimate_model(str(path), {}, ["trn1"], tensor_parallel_size=1).estimates
    sizes = measure_model(AutoConfig.from_pretrained(path), name, dtype, trust_remote_code=False)
    assert one.memory.weights == tensor_bytes(path / "weights/model.safetensors", sizes)
    read_state = artifact_runner(path).executable.read_state
    assert one.memory.kv_cache == sum(read_state(state.name).nbytes for state in Artifact.open(path).states())
    assert one.config.to_dict() == tiny_config(dtype=dtype).to_dict() | {"target": "trn1"}
    options = {"dtype": dtype, "sequence_length": 64}
    (again,) = estimate_model(str(checkpoints[name]), options, ["trn1"], tensor_parallel_size=1).estimates
    assert again.memory.weights == one.memory.weights


@pytest.mark.parametrize(
    ("kind", "option"), [("glm_moe_dsa", "index_topk"), ("minimax_m3_vl_text", "index_topk_blocks")]
)
def test_index_keys_are_counted_where_a_text_has_more_than_a_layer_selects(kind: str, option: str) -> None:
    def kept(**changes: Any) -> int:
        config = AutoConfig.for_model(kind, **SELECTING[kind] | changes)
        return cache_bytes(core_sizes(sized(config, "float32"), 1), tiny_config(target="hlo"))

    index = 4 * 64 * 16 * 4  # slots, tokens, numbers and their bytes, of one layer
    assert kept() - kept(**{option: 64}) == index


@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_each_core_has_what_a_rank_writes(name: str, cores: int, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(checkpoints[name])
    sizes = measure_model(model.config, name, "float32", trust_remote_code=False)
    try:
        plan = shard_plan(model, cores)
    except ValueError as refusal:
        with pytest.raises(ValueError, match=re.escape(str(refusal))):
            core_sizes(sizes, cores)
        return
    (tmp_path / "weights").mkdir()
    write_sharded_weights(named_tensors(model), plan, tmp_path)
    core = core_sizes(sizes, cores)
    files = [tmp_path / f"weights/tp{rank}.safetensors" for rank in range(cores)]
    assert {tensor_bytes(file, sizes) for file in files} == {core.weight_bytes}
    shared = list(plan.attention.values())
    heads = [layer.kv_heads for layer in core.spec.states_of(KeyValueState)]
    assert not shared or heads == [one.local_key_value for one in shared]
    assert core.heads == sum(one.local_query for one in shared) or not shared
    channels = [state.channels for state in sizes.spec.states_of(ConvolutionState)]
    assert [cores * state.channels for state in core.spec.states_of(ConvolutionState)] == channels


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "nemotron_h"])
def test_a_core_is_counted_with_the_states_of_a_rank(name: str) -> None:
    model = make_model(name)
    sizes = measure_model(model.config, name, "float32", trust_remote_code=False)
    with no_data():
        rank = data_free_copy(model)
        apply_plan(rank, shard_plan(model, 2))
        spec = inspect_model(rank)
    core = core_sizes(sizes, 2)
    for kind in (RecurrentState, ConvolutionState):
        assert core.spec.states_of(kind) == spec.states_of(kind)
    assert core.state_bytes < core_sizes(sizes, 1).state_bytes


def test_one_layer_of_each_kind_decides_for_all() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    config = Qwen3Config(
        **TINY | {"num_hidden_layers": 6}, layer_types=types, sliding_window=8, use_sliding_window=True
    )
    sizes = sized(config)
    kinds = sizes.kinds
    assert len(kinds.model.model.layers) == 2 and kinds.places == (0, 1) * 3
    short, whole = shard_plan(kinds.model, 4), shard_plan(sizes.model, 4)
    assert all(whole.local_shape(w.name) == short.local_shape(kinds.short_name(w.name)) for w in sizes.weights)
    assert {kinds.short_name(name) for name in whole.attention} == set(short.attention)
    config = TINY_CONFIGS["deepseek_v3"]()
    config.num_hidden_layers = 3
    assert sized(config).kinds.places == (0, 1, 1)  # the first is dense


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mixtral", "phi3"])
def test_operations_are_those_of_a_step(name: str, checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints[name])
    core = core_sizes(measure_model(model.config, name, "float32", trust_remote_code=False), 1)
    config = tiny_config(on_device_sampling=False)
    cache = KVCache(state_specs(config, core.spec))
    for graph in graph_specs(config):
        step = StepModule(model, cache, graph, NEURON_OPS)
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            step(*example_inputs(graph.inputs()))
        decode, chunk = (config.batch_size, 1), (config.ctx_batch_size, config.prefill_chunk_size)
        rows = [decode] * graph.has_decode + [chunk] * graph.has_chunk
        expected = sum(count_flops(core, *group, graph.context_length) for group in rows)
        assert counted.get_total_flops() == expected + expert_work(core, graph.tokens, chip_of("hlo"))[1]


# Without latent attention, for which a fifth more is reserved than a step of three tokens holds.
@pytest.mark.parametrize("limit", [attention.SCORES_LIMIT, 1 << 14])
@pytest.mark.parametrize("name", [*ARCHITECTURES[:-1], "mixtral"])
def test_activations_are_about_what_a_step_holds(
    name: str, limit: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python holds on to what a compiler would free, so eager steps need up to twice as much."""
    monkeypatch.setattr(attention, "SCORES_LIMIT", limit)  # the lower one has scores computed in blocks
    model = load_model(checkpoints[name])
    core = core_sizes(measure_model(model.config, name, "float32", trust_remote_code=False), 1)
    long, wide = {"sequence_length": 256, "context_buckets": (256,)}, {"prefill_chunk_size": 24}
    for sizes in (long, wide):
        config = tiny_config(on_device_sampling=False, **sizes)
        cache = KVCache(state_specs(config, core.spec))
        for graph in graph_specs(config):
            step, inputs = StepModule(model, cache, graph, NEURON_OPS), example_inputs(graph.inputs())
            with torch.no_grad(), Allocations([*model.parameters(), *step.buffers(), *inputs]) as held:
                step(*inputs)
            assert held.peak / 2 <= live_bytes(core, graph, chip_of("hlo"), config.scan_block) <= held.peak


class Allocations(TorchDispatchMode):
    """Bytes of tensors that are alive at once, beside known ones."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.alive.values()))
        return results


def test_experts_are_read_as_far_as_tokens_use_them_and_expected_as_graphs_compute_them() -> None:
    """A decode row reads its own experts, several rows all of them; arithmetic of a chunk follows the routing."""
    core, chip = core_sizes(sized(MixtralConfig()), 8), CHIPS["trn2"]
    (experts,) = core.experts
    assert (experts.layer.experts, experts.layer.per_token, experts.layers) == (8, 2, 32)
    assert experts.bytes == 2 * experts.params
    all_read = core.weight_bytes - core.table_bytes
    assert weight_bytes_read(core, 1) == pytest.approx(all_read - 0.75 * experts.bytes)
    assert weight_bytes_read(core, 1000) == pytest.approx(all_read)
    assert routed_flops(core, 3) == 2 * 3 * experts.params / 4
    one, four, chunk = (expert_work(core, tokens, chip) for tokens in (1, 4, 2048))
    assert one == (experts.bytes // 4, 2 * experts.params // 4)
    assert four[0] == experts.bytes and four[1] == 4 * 2 * experts.params
    assert chunk[1] < 0.5 * 2048 * 2 * experts.params
    for rows, length, (moved, computed) in ((1, 1, one), (1, 2048, chunk)):
        step = step_work(core, rows, length, 4096, chip, 8)
        assert step.weights == pytest.approx((weight_bytes_read(core, 0) + moved) / chip.core_bandwidth)
        products = count_flops(core, rows, length, 0) + computed
        assert step.products == pytest.approx(products / chip.core_flops("bfloat16"))
