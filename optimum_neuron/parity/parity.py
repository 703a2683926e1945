# SPDX-License-Identifier: Apache-2.0
"""The comparison of step graphs with transformers' own code, and the reasons for refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedModelError, first_line
from ..step.attention.state import KeyValueState
from ..step.cache_needs import CacheNeeds
from ..step.features.compressed_keys.state import CompressedKeyState
from ..step.features.recurrence.state import RecurrentState
from ..step.features.selected_keys.state import IndexKeyState
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
from .conditions import attention_decides, few_keys, shaken, windowed_run, windows_of
from .nonfinite import describe_nonfinite


# Keys, or blocks of them, that a layer may select: fewer than the prompt has.
_FEW_KEYS, _FEW_BLOCKS = 3, 2
_FAILURES = (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError)
# Differences of logits are parts of their range over the vocabulary. Below these nothing more is asked; above, a difference
# may be so many times what rounding makes of the same model. Measured in a hundred tiny architectures: at most 1.2 times,
# 2.4 in deep models with routed experts; what is left out makes 5.8 times and more, in bfloat16.
_NEGLIGIBLE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.03}
_TIMES_ROUNDING, _DRAWS = 4.0, 3
# By name: not every version of transformers has the last two, of layers that store nothing, and that store index keys.
_WITHOUT_OTHER_STATE = (DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer", "DynamicIndexedLayer")

# Types of layers that transformers' cache has an empty place for.
_WITHOUT_ATTENTION = ("mlp", "moe")


def check_layers(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raise UnsupportedModelError where a layer keeps other state than was seen, or attends elsewhere."""
    layers = spec.states_of(KeyValueState)
    config = model.config.get_text_config(decoder=True)
    keeping = {each.layer_idx for each in spec.states if not each.by_token}
    keeping |= {
        index for index, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in _WITHOUT_ATTENTION
    }
    state = _other_state(model, keeping | {each.layer_idx for each in spec.states_of(IndexKeyState)})
    expected = getattr(config, "num_hidden_layers", None)
    attending = (expected or 0) - len(keeping - {layer.layer_idx for layer in layers})
    # A layer may attend several times, but all that attend must do so equally often. None has to where all are recurrences.
    nowhere = not layers and attending == 0 and spec.states_of(RecurrentState)
    if not nowhere and (not layers or attending < 1 or len(layers) % attending):
        raise UnsupportedModelError(
            f"{len(layers)} attention calls were seen for num_hidden_layers={expected}; "
            f"{state or 'its layers attend or keep state in code of their own, which sees no cache and no mask of a step'}"
        )
    if state:
        raise UnsupportedModelError(state)


def _other_state(model: PreTrainedModel, keeping: set[int]) -> str | None:
    """Return what else transformers' own cache holds than for the layers in `keeping`, in words; None where nothing."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a model with a cache of its own: the comparison decides
    names = {index: type(layer).__name__ for index, layer in enumerate(layers) if index not in keeping}
    others = {index: name for index, name in names.items() if name not in _WITHOUT_OTHER_STATE}
    if not others:
        return None
    kinds = ", ".join(sorted(set(others.values())))
    shown = ", ".join(map(str, list(others)[:4])) + f", ... ({len(others)} layers)" * (len(others) > 4)
    return (
        f"it keeps more than keys and values in layers {shown}: state of a recurrence, a convolution or a "
        f"selection of keys (transformers' {kinds})"
    )


def check_result(model: PreTrainedModel, spec: ModelSpec, *, by_itself: bool) -> None:
    """Compare a prompt in chunks, among neighbors, with transformers' own attention over the whole prompt.

    Recurrences, compressed keys and windows of own attention need longer prompts. Models without data and those that a target has changed are not
    compared. Raise UnsupportedModelError where logits differ by more than rounding.
    """
    if not is_comparable(model):
        return
    try:
        vocab_size = min(spec.vocab_size, spec.num_embeddings)
        with few_keys(model):
            _compare_short(model, spec)
            if spec.states_of(RecurrentState):
                _compare_long(model, spec, recurrent_run(vocab_size), "computes a recurrence")
        if rates := [each.rate for each in spec.states_of(CompressedKeyState)]:
            run = grouped_run(vocab_size, rates, windows_of(model))
            with few_keys(model, _FEW_KEYS):
                _compare_long(model, spec, run, "computes compressed keys")
        if spec.states_of(IndexKeyState):
            _compare_selections(model, spec, vocab_size)
        if by_itself or CacheNeeds.read_code(model).biased:
            window = windows_of(model)
            with attention_decides(model):
                _compare_short(model, spec)
                if window:
                    _compare_long(model, spec, windowed_run(vocab_size, window), "attends by code of its own")
    except UnsupportedModelError as error:
        if not by_itself:
            raise
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        raise UnsupportedModelError(
            f"0 attention calls were seen for num_hidden_layers={layers}; it attends by code of its own, and {error}"
        ) from error


def _compare_short(model: PreTrainedModel, spec: ModelSpec) -> None:
    prompt, neighbor, another = (random_prompt(min(spec.vocab_size, spec.num_embeddings), seed) for seed in range(3))
    with torch.inference_mode():
        found = _run_steps(partial(step_logits, model, spec, prompt, neighbor))
        reference: Callable[[], Tensor] = partial(own_logits, model, prompt)
        try:
            expected = reference()
        except _FAILURES:
            # transformers' own attention cannot run this config either: chunks must be as good as the whole
            reference = partial(whole_logits, model, spec, prompt)
            expected = reference()
        if not expected.isfinite().all():
            dtype = str(model.dtype).removeprefix("torch.")
            finite = f"its weights are, so {dtype} is too narrow for it, or its config is wrong; try another dtype, or correct it"
            raise UnsupportedModelError(f"its logits are not finite: {describe_nonfinite(model) or finite}")
        difference, tolerance = _measure_difference(model, reference, found, expected)
        if difference <= tolerance:
            return
        leaked = _row_differences(step_logits(model, spec, prompt, another), found)
        cause = _find_cause(model, prompt, expected, tolerance, leak=float(leaked.max()) > tolerance)
    raise UnsupportedModelError(
        f"it {cause}: logits differ by {difference:.1g} of their range from those of transformers' own attention"
    )


def _compare_selections(model: PreTrainedModel, spec: ModelSpec, vocab_size: int) -> None:
    width = max(each.width for each in spec.states_of(IndexKeyState))
    few = _FEW_KEYS if width == 1 else _FEW_BLOCKS
    states = (
        replace(each, always=few * each.width) if isinstance(each, IndexKeyState) else each for each in spec.states
    )
    selecting = replace(spec, states=tuple(states))
    with few_keys(model, few):
        if width == 1:
            _compare_short(model, selecting)
        else:
            _compare_long(model, selecting, selecting_run(vocab_size, width), "selects keys")


def _compare_long(model: PreTrainedModel, spec: ModelSpec, run: LongRun, doing: str) -> None:
    with torch.inference_mode():
        found = _run_steps(partial(long_logits, model, spec, run))
        reference: Callable[[], Tensor] = partial(own_logits, model, run.prompt, outputs=run.outputs)
        try:
            expected = reference()
        except _FAILURES as error:
            raise UnsupportedModelError(
                f"it {doing}, and cannot be compared: transformers' own code fails on a prompt of {len(run.prompt)} tokens: "
                f"{first_line(error)}"
            ) from error
        difference, tolerance = _measure_difference(model, reference, found, expected)
    if difference > tolerance:
        raise UnsupportedModelError(
            f"it {doing} otherwise over {len(run.prompt)} tokens in chunks than at once: logits differ by "
            f"{difference:.1g} of their range from those of transformers' own code"
        )


def _measure_difference(
    model: PreTrainedModel, reference: Callable[[], Tensor], found: Tensor, expected: Tensor
) -> tuple[float, float]:
    """Return by how much logits differ, and by how much they may; rounding is measured only where it matters."""
    difference, tolerance = float(_row_differences(found, expected).median()), _NEGLIGIBLE[model.dtype]
    for seed in range(_DRAWS if difference > tolerance else 0):
        with shaken(model, seed):  # routing to experts included
            moved = float(_row_differences(reference(), expected).median())
        tolerance = max(tolerance, _TIMES_ROUNDING * moved)
    return difference, tolerance


def _run_steps(run: Callable[[], Tensor]) -> Tensor:
    try:
        return run()
    except UnsupportedModelError:
        raise
    except _FAILURES as error:
        raise UnsupportedModelError(f"it fails on a prompt in chunks next to another: {first_line(error)}") from error


def _find_cause(model: PreTrainedModel, prompt: Tensor, expected: Tensor, tolerance: float, *, leak: bool) -> str:
    """Return why steps compute something else, as far as it can be found."""
    if leak:
        return "lets tokens of different requests in a step influence each other outside of the attention interface"
    positions = torch.arange(PROMPT, dtype=torch.int32)[None]
    try:
        numbered, spaced = (own_logits(model, prompt, each) for each in (positions, positions * 2))
    except _FAILURES:
        return "computes something else in chunks than at once"
    if torch.equal(spaced, numbered):
        return "ignores position_ids and counts the tokens of a call, so that each chunk would begin at position 0"
    if float(_row_differences(numbered, expected).median()) > tolerance:
        return "does not number positions 0, 1, 2, ..., but by a rule of its own"
    return "computes something else in chunks than at once: it has state of its own, or attention of its own"


def is_comparable(model: PreTrainedModel) -> bool:
    """Return whether the model's weights have data, and no target has changed it."""
    changed = f"{__name__.split('.')[0]}.targets."
    tensors = (*model.parameters(), *model.buffers())
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors) and not any(
        type(module).__module__.startswith(changed) for module in model.modules()
    )


def _row_differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return `[outputs]`: the largest difference of each row of logits, as a part of the row's range.

    A token that rounding routes to other experts changes one row; a wrong computation changes most.
    """
    spread = expected.amax(-1) - expected.amin(-1)
    return ((found - expected).abs().amax(-1) / spread.clamp(min=1e-30)).nan_to_num(torch.inf)
