# SPDX-License-Identifier: Apache-2.0
"""Models that step graphs would compute wrongly: found by rules about their layers, and by comparing what they compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...config import NeuronConfig
from ...errors import first_line
from ..experts import EXPERTS_NAME, set_experts
from ..interface import set_implementation
from ..kv_cache import KVCache
from ..masks import UnsupportedModelError
from ..ops import EAGER_OPS
from ..spec import GraphKind, GraphSpec, ModelSpec, graph_specs, state_specs
from ..step import StepModule, example_inputs


# Enough tokens for chunks of several sizes, few enough for the largest models; whose logits are compared.
_PROMPT, _CHUNK, _LENGTH = 7, 4, 16
_OUTPUTS = (2, 4, 5, 6)
_FAILURES = (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError)
# Differences of logits are parts of their range over the vocabulary. Below these nothing more is asked; above, a difference
# may be so many times what rounding makes of the same model. Measured in a hundred tiny architectures: at most 1.2 times,
# 2.4 in deep models with routed experts; what is left out makes 5.8 times and more, in bfloat16.
_NEGLIGIBLE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.03}
_TIMES_ROUNDING, _DRAWS = 4.0, 3
# By name: not every version of transformers has the last, of layers that store nothing.
_WITHOUT_OTHER_STATE = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer")


def check_layers(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises UnsupportedModelError where a layer keeps other state than was seen, or attends elsewhere."""
    convolving = {state.layer_idx for state in spec.convolutions}
    state = _other_state(model, convolving)
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    attending = (expected or 0) - len(convolving - {layer.layer_idx for layer in spec.layers})
    # A layer may attend several times, but all that attend must do so equally often.
    if not spec.layers or attending < 1 or len(spec.layers) % attending:
        raise UnsupportedModelError(
            f"{len(spec.layers)} attention calls were seen for num_hidden_layers={expected}; "
            f"{state or 'its layers attend or keep state in code of their own, which sees no cache and no mask of a step'}"
        )
    if state:
        raise UnsupportedModelError(state)


def _other_state(model: PreTrainedModel, convolving: set[int]) -> str | None:
    """What transformers' own cache of this model holds beside keys and values, and beside the inputs of convolutions.

    Args:
        convolving: layers that keep such inputs, of a model that keeps the state of no recurrence.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a model with a cache of its own: the comparison tells
    others = {index: type(layer).__name__ for index, layer in enumerate(layers)}
    others = {
        index: name for index, name in others.items() if name not in _WITHOUT_OTHER_STATE and index not in convolving
    }
    if not others:
        return None
    kinds = ", ".join(sorted(set(others.values())))
    return (
        f"it keeps more than keys and values in layers {_ranges(list(others))}: state of a recurrence, a convolution or a "
        f"selection of keys (transformers' {kinds})"
    )


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown}, ... ({len(numbers)} layers)"


def check_result(model: PreTrainedModel, spec: ModelSpec, *, by_itself: bool) -> None:
    """Compares a prompt in chunks, among neighbors, with transformers' own attention over the whole prompt.

    Models without data and models that a target has changed are not compared.

    Args:
        by_itself: the model attends by code of its own.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    if not comparable(model):
        return
    try:
        _compare(model, spec)
    except UnsupportedModelError as error:
        if not by_itself:
            raise
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        raise UnsupportedModelError(
            f"0 attention calls were seen for num_hidden_layers={layers}; it attends by code of its own, and {error}"
        ) from error


def _compare(model: PreTrainedModel, spec: ModelSpec) -> None:
    prompt, neighbor, another = (_tokens(min(spec.vocab_size, spec.num_embeddings), seed) for seed in range(3))
    with torch.inference_mode():
        try:
            found = _step_logits(model, spec, prompt, neighbor)
        except _FAILURES as error:
            raise UnsupportedModelError(_cause_of_failure(model, error)) from error
        reference: Callable[[], Tensor] = partial(_own_logits, model, prompt)
        try:
            expected = reference()
        except _FAILURES:
            # transformers' own attention cannot run this config either: chunks must be as good as the whole
            reference = partial(_whole_logits, model, spec, prompt)
            expected = reference()
        if not expected.isfinite().all():
            raise UnsupportedModelError(_cause_of_nonsense(model))
        difference = float(_differences(found, expected).median())
        if difference <= _NEGLIGIBLE[model.dtype]:
            return
        tolerance = max(_NEGLIGIBLE[model.dtype], _TIMES_ROUNDING * _rounding(model, reference, expected))
        if difference <= tolerance:
            return
        leaked = _differences(_step_logits(model, spec, prompt, another), found)
        cause = _cause(model, prompt, expected, tolerance, leak=float(leaked.max()) > tolerance)
    raise UnsupportedModelError(
        f"it {cause}: logits differ by {difference:.1g} of their range from those of transformers' own attention"
    )


def _rounding(model: PreTrainedModel, reference: Callable[[], Tensor], expected: Tensor) -> float:
    """How far logits move where every layer's results are off by a unit in their last place, routing to experts included."""
    moved = []
    for seed in range(_DRAWS):
        with shaken(model, seed):
            moved.append(float(_differences(reference(), expected).median()))
    return max(moved)


@contextmanager
def shaken(model: nn.Module, seed: int) -> Iterator[None]:
    """Has the results of all innermost modules off by up to a unit in their last place: what rounding may do to a model."""
    generator = torch.Generator().manual_seed(seed)

    def shake(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        unit = (torch.rand(output.shape, generator=generator) * 2 - 1) * torch.finfo(output.dtype).eps
        return (output * (1 + unit.to(torch.promote_types(output.dtype, torch.float32)))).to(output.dtype)

    hooks = [module.register_forward_hook(shake) for module in model.modules() if not list(module.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def describe_nonfinite(model: nn.Module) -> str | None:
    """The first parameter that holds NaN or infinity, in words; None where all are numbers."""
    for name, tensor in model.named_parameters():
        count = tensor.numel() - int(tensor.isfinite().sum())
        if count:
            return f"{name} holds NaN or infinity in {count:,} of {tensor.numel():,} places; repair it, or download it again"
    return None


def _cause_of_nonsense(model: PreTrainedModel) -> str:
    """Why transformers itself computes logits that are not finite."""
    reason = describe_nonfinite(model)
    if reason is None:
        dtype = str(model.dtype).removeprefix("torch.")
        reason = f"its weights are, so {dtype} is too narrow for it, or its config is wrong; try another dtype, or correct it"
    return f"its logits are not finite: {reason}"


def _cause_of_failure(model: PreTrainedModel, error: Exception) -> str:
    if isinstance(error, UnsupportedModelError):
        return str(error)
    for module in model.modules():
        biases = {"alibi", "position_bias"} & set(inspect.signature(module.forward).parameters)
        if biases:
            return f"it adds {biases.pop()} to attention scores in code of its own, for the tokens of one request only"
    return f"it fails on a prompt in chunks beside another: {first_line(error)}"


def _cause(model: PreTrainedModel, prompt: Tensor, expected: Tensor, tolerance: float, *, leak: bool) -> str:
    """Why steps compute something else, as far as it can be found."""
    if leak:
        return "lets tokens of different requests in a step influence each other outside of the attention interface"
    positions = torch.arange(_PROMPT, dtype=torch.int32)[None]
    try:
        numbered, spaced = (_own_logits(model, prompt, each) for each in (positions, positions * 2))
    except _FAILURES:
        return "computes something else in chunks than at once"
    if torch.equal(spaced, numbered):
        return "ignores position_ids and counts the tokens of a call, so that each chunk would begin at position 0"
    if float(_differences(numbered, expected).median()) > tolerance:
        return "does not number positions 0, 1, 2, ..., but by a rule of its own"
    return "computes something else in chunks than at once: it has state of its own, or attention of its own"


def comparable(model: PreTrainedModel) -> bool:
    """Whether the model's weights have data, and no target has changed it."""
    changed = f"{__name__.split('.')[0]}.targets."
    tensors = (*model.parameters(), *model.buffers())
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors) and not any(
        type(module).__module__.startswith(changed) for module in model.modules()
    )


def _tokens(vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size // 8, vocab_size - vocab_size // 8, (_PROMPT,), generator=generator)


def _own_logits(model: PreTrainedModel, prompt: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """`[outputs, vocab]` float32 by transformers' own attention and experts; by default with positions of the model's making."""
    ours = model.config._attn_implementation
    set_implementation(model, "eager")
    set_experts(model, "eager")
    try:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        logits: Tensor = model(input_ids=prompt[None], use_cache=False, **positions).logits[0]
    finally:
        set_implementation(model, ours)
        set_experts(model, EXPERTS_NAME)
    return logits[list(_OUTPUTS)].float()


def _step_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor, neighbor: Tensor) -> Tensor:
    """Logits after the tokens `_OUTPUTS` of a prompt in slot 1, in steps that it shares with a neighbor in slot 0."""
    graphs = _graphs(model, spec, _CHUNK)
    texts = (neighbor, prompt)
    outputs = [
        graphs["chunked_prefill"](*_inputs(graphs["chunked_prefill"].spec, texts, {}, (1, 0, 3)))[0][0],
        graphs["mixed"](*_inputs(graphs["mixed"].spec, texts, {0: 0}, (1, 3, 5)))[1][0],
        graphs["mixed"](*_inputs(graphs["mixed"].spec, texts, {1: 5}, (0, 1, 5)))[0][1],
        graphs["token_generation"](*_inputs(graphs["token_generation"].spec, texts, {0: 5, 1: 6}, None))[0][1],
    ]
    return torch.stack(outputs)


def _whole_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor) -> Tensor:
    """The same of steps that take the prompt alone and in one chunk."""
    graph = _graphs(model, spec, 2 * _CHUNK)["chunked_prefill"]
    ends = [_inputs(graph.spec, (prompt, prompt), {}, (1, 0, last + 1)) for last in _OUTPUTS]
    return torch.stack([graph(*inputs)[0][0] for inputs in ends])


def _graphs(model: PreTrainedModel, spec: ModelSpec, chunk: int) -> dict[GraphKind, StepModule]:
    config = NeuronConfig(
        batch_size=2, sequence_length=_LENGTH, prefill_chunk_size=chunk, on_device_sampling=False, dtype="float32"
    )
    cache = KVCache(state_specs(config, spec)).to(dtype=model.dtype)
    return {graph.kind: StepModule(model, cache, graph, EAGER_OPS) for graph in graph_specs(config)}


def _inputs(
    graph: GraphSpec, texts: tuple[Tensor, ...], decode: dict[int, int], chunk: tuple[int, int, int] | None
) -> list[Tensor]:
    """A step's inputs: `decode` is slot to position, `chunk` is a slot, its first position and the one after its last."""
    inputs = dict(zip((tensor.name for tensor in graph.inputs()), example_inputs(graph.inputs()), strict=True))
    if graph.has_decode:
        inputs["decode.position_ids"].fill_(-1)
    for slot, position in decode.items():
        inputs["decode.position_ids"][slot] = position
        inputs["decode.input_ids"][slot] = texts[slot][position]
    if chunk is not None:
        slot, start, stop = chunk
        positions = torch.arange(start, start + graph.chunk_size).clamp(max=stop - 1)
        inputs["chunk.position_ids"][0] = positions
        inputs["chunk.input_ids"][0] = texts[slot][positions]
        inputs["chunk.seq_ids"][0] = slot
    return list(inputs.values())


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """`[outputs]`: of each row of logits the largest difference, as a part of the row's range.

    A token that is routed to other experts by rounding changes one row; what is computed wrongly changes most.
    """
    spread = expected.amax(-1) - expected.amin(-1)
    return ((found - expected).abs().amax(-1) / spread.clamp(min=1e-30)).nan_to_num(torch.inf)
