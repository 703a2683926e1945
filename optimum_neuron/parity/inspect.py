# SPDX-License-Identifier: Apache-2.0
"""What a model is asked once, before its step graphs are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..config import NeuronConfig
from ..errors import first_line
from ..step.features.experts.experts import no_experts, routing, set_experts
from ..step.layer_recorder import LayerRecorder
from ..step.masks import UnsupportedModelError
from ..step.model_cache import Backends, CacheNeeds
from ..step.model_spec import ModelSpec
from ..step.one_thread import one_thread
from ..step.stand_ins import set_stand_ins
from ..step.step import accepts
from .own_attention import check_own_masks
from .parity import check_layers, check_result, comparable
from .vocabulary import LookUps


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Runs the model on a few tokens and returns what its graphs need to know.

    A model whose weights have data is also run as step graphs, and must compute what transformers' own attention does.

    Raises:
        ValueError: the model cannot run as step graphs; the reason is named.
    """
    with _explained(model), one_thread():
        spec = _seen(model)
        check_result(model, spec, by_itself=CacheNeeds.of(model).by_itself)
    return spec


def inspect_layers(model: PreTrainedModel) -> ModelSpec:
    """What `inspect_model` returns, of a model whose weights are any numbers: nothing is compared.

    Raises:
        ValueError: the model cannot run as step graphs, as far as its layers tell.
    """
    with _explained(model), one_thread():
        return _seen(model)


@contextmanager
def _explained(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {error}{_remedy(model, error)}") from error


def _seen(model: PreTrainedModel) -> ModelSpec:
    if CacheNeeds.of(model).by_itself:
        check_own_masks(model)
    spec = _record(model)
    check_layers(model, spec)
    return spec


def check_blocks(model: PreTrainedModel, config: NeuronConfig) -> bool:
    """Whether all layers gather their blocks in each step, as a model's own code has no other way.

    Raises:
        ValueError: they do, and blocks are to attend where they lie.
    """
    if config.kv_block_size is None or not CacheNeeds.of(model).by_itself:
        return False
    if config.blocks_in_place:
        raise ValueError(
            f"{type(model).__name__} attends by code of its own, over slots, and on target={config.target!r} blocks attend where "
            f"they lie; leave out kv_block_size={config.kv_block_size} and kv_cache_tokens"
        )
    return True


def check_selections(model: PreTrainedModel, spec: ModelSpec, config: NeuronConfig) -> list[int]:
    """The layers that select keys of which none can be left out here: a text has no more than they attend to anyway.

    Raises:
        ValueError: some layers do select, and blocks are to attend where they lie.
    """
    selecting = [each.layer_idx for each in spec.selections if each.selects(config)]
    if selecting and config.blocks_in_place:
        raise ValueError(
            f"{len(selecting)} layers of {type(model).__name__} select {min(each.always for each in spec.selections)} keys of up to "
            f"sequence_length={config.sequence_length}, and on target={config.target!r} blocks attend where they lie, all of them; "
            f"leave out kv_block_size={config.kv_block_size} and kv_cache_tokens, or lower sequence_length"
        )
    return [each.layer_idx for each in spec.selections if each.layer_idx not in selecting]


def check_compressions(model: PreTrainedModel, spec: ModelSpec, config: NeuronConfig) -> None:
    """Raises ValueError where layers keep compressed keys by slots, and blocks are to attend where they lie."""
    layers = {each.layer_idx for each in spec.compressions if each.has_groups(config)}
    if layers and config.blocks_in_place:
        raise ValueError(
            f"{len(layers)} layers of {type(model).__name__} keep compressed keys, a slot's side by side, and on "
            f"target={config.target!r} blocks attend where they lie; leave out kv_block_size={config.kv_block_size} and kv_cache_tokens"
        )


def check_kv_codes(model: PreTrainedModel, spec: ModelSpec, config: NeuronConfig) -> None:
    """Raises ValueError where keys and values are to be codes, and the model has none, or reads them in other ways than attention does."""
    if config.kv_cache_dtype is None:
        return
    name, option = type(model).__name__, f"kv_cache_dtype={config.kv_cache_dtype!r}"
    if not spec.layers:
        raise ValueError(
            f"{option} is of keys and values, and {name} keeps none: states of recurrences and convolutions stay as they are; leave it out"
        )
    if CacheNeeds.of(model).by_itself:
        raise ValueError(
            f"{name} attends by code of its own, which takes keys and values as numbers, and {option} keeps codes; leave it out"
        )
    layers = {each.layer_idx for each in spec.compressions if each.has_groups(config)}
    if layers:
        raise ValueError(
            f"{len(layers)} layers of {name} attend to compressed keys and to others, and {option} has no codes of these; leave it out"
        )


def check_snapshots(model: nn.Module, spec: ModelSpec, config: NeuronConfig) -> None:
    """Raises ValueError where snapshots of state are asked for, and slots keep none."""
    for name in ("state_snapshots", "state_snapshot_interval"):
        count = getattr(config, name)
        if count and spec.reuses_prefixes:
            raise ValueError(
                f"{name}={count} is for state that slots keep, and those of {type(model).__name__} keep keys and values alone, of which "
                f"any prefix is reused; leave {name} out"
            )


class _NoProducts(TorchFunctionMode):
    """Linear layers give zeros: their shapes are enough, and a product with one row reads all weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _zeros(*args, **kwargs or {}) if func is nn.functional.linear else func(*args, **kwargs or {})


def _zeros(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_zeros((*input.shape[:-1], weight.shape[0]))


def look_at(
    model: PreTrainedModel,
    call: Callable[..., Any] | None = None,
    *,
    token_id: int = 0,
    position: int = 0,
    sequence_length: int = 1,
) -> ModelSpec:
    """Runs a token with attention, experts and linear layers that only look on: what each layer keeps, and the vocabulary's size.

    Args:
        call: runs the model; by default the model itself.
        token_id, position: what it runs on, and where.
        sequence_length: of the texts that it is to take.
    """
    needs = CacheNeeds.of(model)
    recorder = LayerRecorder(by_itself=needs.by_itself, biased=needs.biased)
    set_experts(model)
    set_stand_ins(model)
    token, positions = (torch.full((1, 1), each, dtype=torch.int32) for each in (token_id, position))
    kwargs: dict[str, Any] = {"attention_backend": recorder} if accepts(model, "attention_backend") else {}
    backends = Backends(recorder, recorder, recorder, recorder, recorder)
    kwargs |= needs.arguments(positions[0], backends, sequence_length)
    kwargs |= {"input_ids": token, "use_cache": False}
    with torch.inference_mode(), backends.serving(positions[0]), routing(no_experts), _NoProducts():
        logits: Tensor = (call or model)(**kwargs).logits
    vocab_size = logits.shape[-1]
    return ModelSpec(
        vocab_size,
        tuple(recorder.layers),
        tuple(recorder.convolutions),
        tuple(recorder.recurrences),
        tuple(recorder.selections),
        tuple(recorder.compressions),
        num_embeddings=vocab_size,
    )


def _num_embeddings(model: PreTrainedModel, vocab_size: int) -> int:
    token_id = vocab_size // 2
    with LookUps(token_id) as look_ups:
        look_at(model, token_id=token_id)
    return min(look_ups.rows, default=vocab_size)


def _record(model: PreTrainedModel) -> ModelSpec:
    try:
        spec = look_at(model)
        return replace(spec, num_embeddings=_num_embeddings(model, spec.vocab_size)) if comparable(model) else spec
    except (UnsupportedModelError, DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"it fails on a token with its position and no cache: {first_line(error)}"
        ) from error


def _remedy(model: PreTrainedModel, error: UnsupportedModelError) -> str:
    """Where transformers keeps some weights in float32, as a model's class asks for, its code may not run in another type."""
    types = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()}
    if len(types) < 2 or not isinstance(error.__cause__, RuntimeError):
        return ""
    return f"; its weights are of {' and '.join(sorted(types))}: try dtype='float32'"
