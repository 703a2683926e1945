# SPDX-License-Identifier: Apache-2.0
"""Models that step graphs would compute wrongly: found by rules about their layers, and by comparing what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import first_line
from ..step.masks import UnsupportedModelError
from ..step.model_cache import CacheNeeds
from ..step.model_spec import ModelSpec
from .comparison_runs import (
    PROMPT,
    LongRun,
    grouped_run,
    long_logits,
    own_logits,
    random_prompt,
    recurrent_run,
    selecting_run,
    step_logits,
    whole_logits,
)
from .few_keys import few_keys
from .own_attention import decisive, windowed_run, windows_of


# Of a layer that selects keys, or blocks of them: fewer than the prompt has; so many compressed keys, too.
_FEW_KEYS, _FEW_BLOCKS = 3, 2
_FAILURES = (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError)
# Differences of logits are parts of their range over the vocabulary. Below these nothing more is asked; above, a difference
# may be so many times what rounding makes of the same model. Measured in a hundred tiny architectures: at most 1.2 times,
# 2.4 in deep models with routed experts; what is left out makes 5.8 times and more, in bfloat16.
_NEGLIGIBLE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.03}
_TIMES_ROUNDING, _DRAWS = 4.0, 3
_COUNTED_AT_ONCE = 1 << 20
# Of codes, scales say what they stand for.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# By name: not every version of transformers has the last two, of layers that store nothing, and that store index keys.
_WITHOUT_OTHER_STATE = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer", "DynamicIndexedLayer")

# Types of layers that transformers' cache has an empty place for.
_WITHOUT_ATTENTION = ("mlp", "moe")


def check_layers(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises UnsupportedModelError where a layer keeps other state than was seen, or attends elsewhere."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    keeping = spec.stateful_layers | {index for index, kind in enumerate(types) if kind in _WITHOUT_ATTENTION}
    state = _other_state(model, keeping | {each.layer_idx for each in spec.selections})
    expected = getattr(config, "num_hidden_layers", None)
    attending = (expected or 0) - len(keeping - {layer.layer_idx for layer in spec.layers})
    # A layer may attend several times, but all that attend must do so equally often. None has to where all are recurrences.
    nowhere = not spec.layers and attending == 0 and spec.recurrences
    if not nowhere and (not spec.layers or attending < 1 or len(spec.layers) % attending):
        raise UnsupportedModelError(
            f"{len(spec.layers)} attention calls were seen for num_hidden_layers={expected}; "
            f"{state or 'its layers attend or keep state in code of their own, which sees no cache and no mask of a step'}"
        )
    if state:
        raise UnsupportedModelError(state)


def _other_state(model: PreTrainedModel, keeping: set[int]) -> str | None:
    """What transformers' own cache of this model holds beside keys and values, index keys, and what else of its layers was seen.

    Args:
        keeping: layers that keep inputs of convolutions, states of recurrences or compressed keys, which were seen, or nothing at all.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a model with a cache of its own: the comparison tells
    others = {index: type(layer).__name__ for index, layer in enumerate(layers)}
    others = {
        index: name for index, name in others.items() if name not in _WITHOUT_OTHER_STATE and index not in keeping
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

    A model with recurrences is compared on a second prompt, which is longer than their blocks; one with compressed keys on one of several
    groups of tokens; one that attends by code of its own on one longer than its window, and where its attention decides.

    Models without data and models that a target has changed are not compared.

    Args:
        by_itself: the model attends by code of its own.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    if not comparable(model):
        return
    try:
        vocab_size = min(spec.vocab_size, spec.num_embeddings)
        with few_keys(model):
            _compare(model, spec)
            if spec.recurrences:
                _compare_long(model, spec, recurrent_run(vocab_size), "computes a recurrence")
        if spec.compressions:
            run = grouped_run(vocab_size, [each.rate for each in spec.compressions], windows_of(model))
            with few_keys(model, _FEW_KEYS):
                _compare_long(model, spec, run, "computes compressed keys")
        if spec.selections:
            _compare_selections(model, spec, vocab_size)
        if by_itself or CacheNeeds.of(model).biased:
            _compare_own_attention(model, spec, vocab_size)
    except UnsupportedModelError as error:
        if not by_itself:
            raise
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        raise UnsupportedModelError(
            f"0 attention calls were seen for num_hidden_layers={layers}; it attends by code of its own, and {error}"
        ) from error


def _compare(model: PreTrainedModel, spec: ModelSpec) -> None:
    prompt, neighbor, another = (random_prompt(min(spec.vocab_size, spec.num_embeddings), seed) for seed in range(3))
    with torch.inference_mode():
        try:
            found = step_logits(model, spec, prompt, neighbor)
        except _FAILURES as error:
            raise UnsupportedModelError(_cause_of_failure(error)) from error
        reference: Callable[[], Tensor] = partial(own_logits, model, prompt)
        try:
            expected = reference()
        except _FAILURES:
            # transformers' own attention cannot run this config either: chunks must be as good as the whole
            reference = partial(whole_logits, model, spec, prompt)
            expected = reference()
        if not expected.isfinite().all():
            raise UnsupportedModelError(_cause_of_nonsense(model))
        difference, tolerance = _compared(model, reference, found, expected)
        if difference <= tolerance:
            return
        leaked = _differences(step_logits(model, spec, prompt, another), found)
        cause = _cause(model, prompt, expected, tolerance, leak=float(leaked.max()) > tolerance)
    raise UnsupportedModelError(
        f"it {cause}: logits differ by {difference:.1g} of their range from those of transformers' own attention"
    )


def _compare_selections(model: PreTrainedModel, spec: ModelSpec, vocab_size: int) -> None:
    """Once more with layers that select so few that some are left out."""
    width = max(each.width for each in spec.selections)
    few = _FEW_KEYS if width == 1 else _FEW_BLOCKS
    selecting = replace(spec, selections=tuple(replace(each, always=few * each.width) for each in spec.selections))
    with few_keys(model, few):
        if width == 1:
            _compare(model, selecting)
        else:
            _compare_long(model, selecting, selecting_run(vocab_size, width), "selects keys")


def _compare_own_attention(model: PreTrainedModel, spec: ModelSpec, vocab_size: int) -> None:
    """Once more where attention decides, and over more tokens than a window has."""
    window = windows_of(model)
    with decisive(model):
        _compare(model, spec)
        if window:
            _compare_long(model, spec, windowed_run(vocab_size, window), "attends by code of its own")


def _compare_long(model: PreTrainedModel, spec: ModelSpec, run: LongRun, doing: str) -> None:
    with torch.inference_mode():
        try:
            found = long_logits(model, spec, run)
        except _FAILURES as error:
            raise UnsupportedModelError(_cause_of_failure(error)) from error
        reference: Callable[[], Tensor] = partial(own_logits, model, run.prompt, outputs=run.outputs)
        try:
            expected = reference()
        except _FAILURES as error:
            raise UnsupportedModelError(
                f"it {doing}, and cannot be compared: transformers' own code fails on a prompt of {len(run.prompt)} tokens: "
                f"{first_line(error)}"
            ) from error
        difference, tolerance = _compared(model, reference, found, expected)
    if difference > tolerance:
        raise UnsupportedModelError(
            f"it {doing} otherwise over {len(run.prompt)} tokens in chunks than at once: logits differ by "
            f"{difference:.1g} of their range from those of transformers' own code"
        )


def _compared(
    model: PreTrainedModel, reference: Callable[[], Tensor], found: Tensor, expected: Tensor
) -> tuple[float, float]:
    """By how much logits differ, and by how much they may; rounding is measured only where it matters."""
    difference, tolerance = float(_differences(found, expected).median()), _NEGLIGIBLE[model.dtype]
    if difference > tolerance:
        tolerance = max(tolerance, _TIMES_ROUNDING * _rounding(model, reference, expected))
    return difference, tolerance


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

    with ExitStack() as hooks:
        for module in model.modules():
            if not list(module.children()):
                hooks.callback(module.register_forward_hook(shake).remove)
        yield


def describe_nonfinite(model: nn.Module) -> str | None:
    """The first parameter that holds NaN or infinity, in words; None where all are numbers."""
    found = (nonfinite(name, tensor) for name, tensor in model.named_parameters())
    return next(filter(None, found), None)


def nonfinite(name: str, tensor: Tensor) -> str | None:
    """That a tensor holds NaN or infinity, in words; None where all are numbers."""
    if not tensor.numel() or tensor.dtype not in _FLOATS or all(each.isfinite() for each in tensor.aminmax()):
        return None
    # In pieces: torch takes 8 bytes for each element that it counts.
    pieces = tensor.reshape(-1).split(_COUNTED_AT_ONCE)
    count = sum(piece.numel() - int(piece.isfinite().sum()) for piece in pieces)
    return f"{name} holds NaN or infinity in {count:,} of {tensor.numel():,} places; repair it, or download it again"


def _cause_of_nonsense(model: PreTrainedModel) -> str:
    """Why transformers itself computes logits that are not finite."""
    reason = describe_nonfinite(model)
    if reason is None:
        dtype = str(model.dtype).removeprefix("torch.")
        reason = f"its weights are, so {dtype} is too narrow for it, or its config is wrong; try another dtype, or correct it"
    return f"its logits are not finite: {reason}"


def _cause_of_failure(error: Exception) -> str:
    if isinstance(error, UnsupportedModelError):
        return str(error)
    return f"it fails on a prompt in chunks next to another: {first_line(error)}"


def _cause(model: PreTrainedModel, prompt: Tensor, expected: Tensor, tolerance: float, *, leak: bool) -> str:
    """Why steps compute something else, as far as it can be found."""
    if leak:
        return "lets tokens of different requests in a step influence each other outside of the attention interface"
    positions = torch.arange(PROMPT, dtype=torch.int32)[None]
    try:
        numbered, spaced = (own_logits(model, prompt, each) for each in (positions, positions * 2))
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


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """`[outputs]`: of each row of logits the largest difference, as a part of the row's range.

    A token that is routed to other experts by rounding changes one row; what is computed wrongly changes most.
    """
    spread = expected.amax(-1) - expected.amin(-1)
    return ((found - expected).abs().amax(-1) / spread.clamp(min=1e-30)).nan_to_num(torch.inf)
