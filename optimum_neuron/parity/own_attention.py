# SPDX-License-Identifier: Apache-2.0
"""Models that attend in code of their own: what a few tokens with weights that attend to all alike would not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..step.masks import UnsupportedModelError
from ..step.model_cache import keeps_keys
from .comparison_runs import LongRun, random_prompt


# Of modules that make queries and keys, alone or together: parts of their names.
_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "qkv", "c_attn")
# The size of their numbers with which scores have a spread of some units, where those of freshly made weights are near zero.
_DECISIVE = 1.0


def check_own_masks(model: nn.Module) -> None:
    """Raises UnsupportedModelError where attention hides keys by a square table of places.

    A row of such a table is a query's place in its call, and a column a key's. In a step both have other places.
    """
    for name, module in model.named_modules():
        for key, table in module.named_buffers(recurse=False):
            if keeps_keys(module) and table.dim() > 1 and table.shape[-1] == table.shape[-2] > 1:
                raise UnsupportedModelError(
                    f"it attends by code of its own, which hides keys by a table of places in a call, {name}.{key} "
                    f"{list(table.shape)}: in a step tokens and keys have other places"
                )


def windows_of(model: PreTrainedModel) -> int:
    """The longest window of a model's config, by whatever name it has one; 0 without any."""
    options = model.config.get_text_config(decoder=True).to_dict()
    return max((size for name, size in options.items() if "window" in name and type(size) is int), default=0)


def windowed_run(vocab_size: int, window: int) -> LongRun:
    """Longer than a window: the tokens that are compared do not see the first ones."""
    last = window + 40
    prompt, another = (random_prompt(vocab_size, seed, last + 1) for seed in (5, 6))
    # Whole chunks, and the last ones so short that three outputs are compared.
    cuts = (*range(0, last - 4, 64), last - 4, last - 2, last)
    return LongRun(prompt, another, cuts, (last - 5, last - 3, last - 1, last))


@contextmanager
def decisive(model: nn.Module) -> Iterator[None]:
    """Within it, attention decides: all queries and keys are of one size, in transformers' code and in steps. No weight is copied."""

    def resize(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor):
            return None
        numbers = output.float()
        size = numbers.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-20)
        return (numbers * (_DECISIVE / size)).to(output.dtype)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if any(part in name.split(".")[-1] for part in _QUERIES_AND_KEYS) and not list(module.children()):
                hooks.callback(module.register_forward_hook(resize).remove)
        yield
