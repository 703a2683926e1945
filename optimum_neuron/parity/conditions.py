# SPDX-License-Identifier: Apache-2.0
"""Conditions under which a comparison shows a difference: attention that decides, and few selected keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..step.cache_needs import keeps_keys, selects_keys
from .comparison_runs import LongRun, random_prompt


# Of modules that make queries and keys, alone or together: parts of their names.
_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "qkv", "c_attn")
# The size of their numbers with which scores have a spread of some units, where those of freshly made weights are near zero.
_DECISIVE = 1.0


def check_own_masks(model: nn.Module) -> None:
    """Raise UnsupportedModelError where attention hides keys by a square table of places, of queries and keys of a call, not of a step."""
    for name, module in model.named_modules():
        for key, table in module.named_buffers(recurse=False):
            if keeps_keys(module) and table.dim() > 1 and table.shape[-1] == table.shape[-2] > 1:
                raise UnsupportedModelError(
                    f"it attends by code of its own, which hides keys by a table of places in a call, {name}.{key} "
                    f"{list(table.shape)}: in a step tokens and keys have other places"
                )


def windows_of(model: PreTrainedModel) -> int:
    """Return the longest window in a model's config, under any name; 0 without one."""
    options = model.config.get_text_config(decoder=True).to_dict()
    return max((size for name, size in options.items() if "window" in name and type(size) is int), default=0)


def windowed_run(vocab_size: int, window: int) -> LongRun:
    """Return a prompt longer than a window: the compared tokens do not see the first ones."""
    last = window + 40
    prompt, another = (random_prompt(vocab_size, seed, last + 1) for seed in (5, 6))
    # Whole chunks, and the last ones so short that three outputs are compared.
    cuts = (*range(0, last - 4, 64), last - 4, last - 2, last)
    return LongRun(prompt, another, cuts, (last - 5, last - 3, last - 1, last))


@contextmanager
def _changing_outputs(modules: Iterable[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the results of innermost modules within, where they are tensors of floating-point numbers."""

    def change_output(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        return change(output) if isinstance(output, Tensor) and output.is_floating_point() else None

    with ExitStack() as hooks:
        for module in modules:
            if not list(module.children()):
                hooks.callback(module.register_forward_hook(change_output).remove)
        yield


def attention_decides(model: nn.Module) -> AbstractContextManager[None]:
    """Make attention decide within: all queries and keys have one size, in transformers' code and in steps. No weight is copied."""

    def resize(output: Tensor) -> Tensor:
        numbers = output.float()
        size = numbers.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-20)
        return (numbers * (_DECISIVE / size)).to(output.dtype)

    parts = [(name.split(".")[-1], module) for name, module in model.named_modules()]
    chosen = [module for own, module in parts if any(part in own for part in _QUERIES_AND_KEYS)]
    return _changing_outputs(chosen, resize)


# More than any layer selects.
ALL = 1 << 30


class _Top(NamedTuple):
    values: Tensor
    indices: Tensor


class _FewKeys(TorchFunctionMode):
    """A mode in which each top-k within the code of a layer that selects keys takes at most `most`, of equal ones the first.

    torch may take any of equal ones; scores through a rectifier are often equal.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.running = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self.running or func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return self._limit_top(func, *args, **(kwargs or {}))

    def _limit_top(
        self, func: Any, scores: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> Any:
        if not isinstance(scores, Tensor):
            return func(scores, min(k, self.most), dim)
        values, indices = scores.sort(dim=dim, descending=largest, stable=True)
        return _Top(*(each.narrow(dim, 0, min(k, self.most)) for each in (values, indices)))


@contextmanager
def few_keys(model: nn.Module, most: int = ALL) -> Iterator[None]:
    """Make layers of a model that select keys select at most `most` within, in transformers' code and in steps; of equal scores the first."""
    mode = _FewKeys(most)

    def enter_layer(*_: object) -> None:
        mode.running += 1

    def leave_layer(*_: object) -> None:
        mode.running -= 1

    with ExitStack() as hooks:
        for module in filter(selects_keys, model.modules()):
            hooks.callback(module.register_forward_pre_hook(enter_layer).remove)
            hooks.callback(module.register_forward_hook(leave_layer, always_call=True).remove)
        with mode:
            yield


def shaken(model: nn.Module, seed: int) -> AbstractContextManager[None]:
    """Change the results of all innermost modules by up to a unit in their last place, as rounding may."""
    generator = torch.Generator().manual_seed(seed)

    def shake(output: Tensor) -> Tensor:
        unit = (torch.rand(output.shape, generator=generator) * 2 - 1) * torch.finfo(output.dtype).eps
        return (output * (1 + unit.to(torch.promote_types(output.dtype, torch.float32)))).to(output.dtype)

    return _changing_outputs(model.modules(), shake)
