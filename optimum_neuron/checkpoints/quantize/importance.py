# SPDX-License-Identifier: Apache-2.0
"""The importance of weights' inputs: the mean square of each input of linear layers and experts on a text.

An error of a weight reaches the output times its input. Of two weights with one scale, the one with the larger input should be nearer. A
model's large inputs are nearly the same on any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import progress
from ...errors import first_line
from ...parity.comparison_runs import own_attention
from ...step.features.codes.expert_weights import natural_shape, plain_weights
from ...step.features.experts.experts import ExpertsCall, routing, set_experts, watched_experts
from ...step.one_thread import one_thread
from ..mapped import WritableWhereWritten
from ..scratch import giving_back


# The mean square of fewer tokens, such as those of a rare expert, is chance.
_LEAST_TOKENS = 64
# The least importance, as a share of the mean over a layer's inputs: an input that is 0 on one text need not be on another.
_LEAST_SHARE = 1e-2


def input_importance(model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor) -> dict[str, Tensor]:
    """Return the importance for `round_int4`, by the names of weights; a weight that met too few tokens has none.

    The model runs sequence after sequence by one thread: the same text gives the same bits. It takes the memory of one sequence, and a number
    for each input.

    Args:
        layers: linear layers and layers of experts, by name.
        ids: `[sequences, tokens]`.

    Returns:
        `[inputs]` of a linear layer, `[experts, inputs]` of a weight of experts. An expert that met too few tokens has the mean of the others.

    Raises:
        ValueError: the model cannot run on the text, or a layer's inputs are not finite.
    """
    seen = _InputSquares()
    set_experts(model)
    with ExitStack() as stack:
        for each in (torch.no_grad(), one_thread(), giving_back(), WritableWhereWritten(), own_attention(model)):
            stack.enter_context(each)
        stack.enter_context(_watch_layers(layers, seen))
        stack.enter_context(_ending_at(model.get_output_embeddings()))
        advance = stack.enter_context(progress.stage("Running the calibration text", len(ids)))
        for number, sequence in enumerate(ids, 1):
            _run_model(model, sequence)
            advance(f"sequence {number}")
    return seen.importance()


class _EndedError(Exception):
    """The model has come to its head."""


def _run_model(model: PreTrainedModel, sequence: Tensor) -> None:
    try:
        model(input_ids=sequence[None], use_cache=False)
    except _EndedError:
        pass
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot run on a text of {len(sequence)} tokens ({first_line(error)}); leave out "
            f"--quantization-calibration"
        ) from error


@contextmanager
def _watch_layers(layers: Mapping[str, nn.Module], seen: _InputSquares) -> Iterator[None]:
    experts = {module: name for name, module in layers.items() if not isinstance(module, nn.Linear)}
    with ExitStack() as stack:
        for name, module in layers.items():
            if isinstance(module, nn.Linear):
                watch = partial(_watch_linear, seen, f"{name}.weight")
                stack.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
            else:
                for own, weight in plain_weights(module).items():
                    seen.expect_inputs(f"{name}.{own}", *natural_shape(module, weight)[::2])
        if experts:
            stack.enter_context(routing(partial(_watch_experts, seen, experts)))
        yield


def _watch_linear(
    seen: _InputSquares, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    seen.add_inputs(name, args[0] if args else kwargs["input"])


def _watch_experts(seen: _InputSquares, names: Mapping[nn.Module, str], call: ExpertsCall) -> Tensor:
    name = names.get(call.layer)
    return watched_experts(
        call, lambda own, expert, x: None if name is None else seen.add_inputs(f"{name}.{own}", x, expert)
    )


@contextmanager
def _ending_at(head: nn.Module | None) -> Iterator[None]:
    """End a model's run at its head, which has a weight as large as many layers' and is not int4."""

    def end(*_: object) -> NoReturn:
        raise _EndedError

    with ExitStack() as hooks:
        if head is not None:
            hooks.callback(head.register_forward_pre_hook(end).remove)
        yield


class _InputSquares:
    """Sums of squares of inputs, and the number of their tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def expect_inputs(self, name: str, experts: int, inputs: int) -> None:
        self._sums[name] = torch.zeros(experts, inputs, dtype=torch.float64)
        self._tokens[name] = torch.zeros(experts, dtype=torch.float64)

    def add_inputs(self, name: str, x: Tensor, expert: int = 0) -> None:
        """Add inputs `[..., inputs]` of a weight."""
        if name not in self._sums:
            self.expect_inputs(name, 1, x.shape[-1])
        # Parallel layers, such as those of queries, keys and values, take the same tensor.
        if self._last is None or self._last[0] is not x:
            self._last = x, x.flatten(0, -2).float().square().sum(0)
        self._sums[name][expert] += self._last[1]
        self._tokens[name][expert] += x.numel() // x.shape[-1]

    def importance(self) -> dict[str, Tensor]:
        found = {}
        for name, sums in self._sums.items():
            if not sums.isfinite().all():
                raise ValueError(
                    f"the inputs of {name} are not finite on the calibration text, in the type of the weights; choose another --dtype, or leave "
                    f"out --quantization-calibration"
                )
            enough = self._tokens[name] >= _LEAST_TOKENS
            if not enough.any():
                continue
            means = sums / self._tokens[name].clamp(min=1)[:, None]
            means[~enough] = means[enough].mean(0)
            means += _LEAST_SHARE * means.mean(-1, keepdim=True)
            if (means > 0).all():  # else all inputs were 0
                found[name] = means.float().squeeze(0) if len(means) == 1 else means.float()
        return found
