# SPDX-License-Identifier: Apache-2.0
"""forward over the graphs: logits of prompts, as a model of transformers returns them, and the loss of labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from ..config import NeuronConfig
from ..runtime.lengths import check_fits
from ..runtime.prefill import BatchPlace, prefill_prompts, score_prompts
from ..runtime.prompts import unpack, unpad
from ..runtime.runner import GraphRunner
from .module import Module


# What transformers leaves out of a loss.
_IGNORED = -100


class Forward(Module):
    """The part of `NeuronModelForCausalLM` that is called as a function of token ids."""

    neuron_config: NeuronConfig
    runner: GraphRunner
    _hold_slots: Callable[..., AbstractContextManager[None]]

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutput:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
    ) -> CausalLMOutput:
        """Return logits `[rows, tokens, vocab]` float32, as a model of transformers returns them; those of padding are zeros.

        Args:
            input_ids: `[rows, tokens]`, or `[1, tokens]` with prompts packed one after another.
            attention_mask: which tokens of padded rows are real.
            labels: as `input_ids`, -100 where none counts: the output then has a `loss`, the model's own.
            logits_to_keep: of which columns, all (0), the last n, or those that a tensor names. Of an artifact that was exported
                without `prompt_logits` 1 alone, and that means each prompt's last real token: `[prompts, 1, vocab]`, on whichever side
                padding is, and of each packed prompt.
            cu_seq_lens_q: where each packed prompt starts, and the number of tokens, as transformers names it.

        Raises:
            ValueError: the artifact's graphs do not return these logits, `labels`, `logits_to_keep`, `cu_seq_lens_q` or
                `attention_mask` does not fit, the prompts do not fit the compiled sizes, or the model does not take a token id.
            TypeError: token ids are no tensor of whole numbers.
        """
        prompts, places = self._split_prompts(input_ids, attention_mask, cu_seq_lens_q)
        columns = _select_columns(logits_to_keep, input_ids.shape[1])
        if labels is not None:
            self._check_labels(labels, input_ids, attention_mask, logits_to_keep)
        if columns is not None and not self.neuron_config.prompt_logits:
            asked = f"logits_to_keep={logits_to_keep} asks for" if labels is None else "labels need"
            raise ValueError(
                f"{asked} logits of more than each prompt's last token, and no graph of this artifact returns them; export it with "
                f"--prompt-logits (prompt_logits=True), or pass logits_to_keep=1 without labels"
            )
        with self._hold_slots():
            self.runner.reserve_slots([len(prompt) for prompt in prompts])
            try:
                if columns is None:
                    _, last = prefill_prompts(self.runner, prompts)
                    assert last is not None
                    return CausalLMOutput(logits=torch.from_numpy(last)[:, None])
                logits = torch.zeros(len(input_ids), len(columns), self.artifact.model.vocab_size)
                score_prompts(self.runner, prompts, places, columns.numpy(), logits.numpy())
            finally:
                self.runner.reset_slots()
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = cast(Any, self._empty).loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutput(loss=loss, logits=logits)

    def _split_prompts(
        self, input_ids: Tensor, attention_mask: Tensor | None, cu_seq_lens_q: Tensor | None
    ) -> tuple[list[np.ndarray], list[BatchPlace]]:
        """Return the real tokens of each prompt, and where the first of them stands."""
        known = self.artifact.model.num_embeddings
        if cu_seq_lens_q is None:
            prompts = unpad(input_ids, attention_mask, known)
            firsts = [0] * len(prompts) if attention_mask is None else attention_mask.int().argmax(-1).tolist()
            places = [BatchPlace(row, first) for row, first in enumerate(firsts)]
        elif attention_mask is not None:
            raise ValueError("attention_mask has no meaning for packed prompts; leave it or cu_seq_lens_q out")
        else:
            prompts = unpack(input_ids, cu_seq_lens_q, known)
            places = [BatchPlace(0, first) for first in cu_seq_lens_q[:-1].tolist()]
        check_fits(prompts, 1, self.neuron_config)
        return prompts, places

    def _check_labels(
        self, labels: Tensor, input_ids: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor
    ) -> None:
        """Raise ValueError for labels of which no loss follows, or another one than transformers'."""
        if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
            raise ValueError(
                f"labels need the logits of all tokens, and logits_to_keep={logits_to_keep}; leave it out"
            )
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != input_ids.shape:
            given = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise ValueError(f"labels are {given}; give torch.int64 {list(input_ids.shape)}, as input_ids")
        counted = labels != _IGNORED
        wrong = labels[counted & ((labels < 0) | (labels >= self.artifact.model.vocab_size))]
        if len(wrong):
            raise ValueError(
                f"labels hold {int(wrong[0])}, and the model has tokens 0 to {self.artifact.model.vocab_size - 1}; give one of "
                f"them, or {_IGNORED} where none counts"
            )
        if attention_mask is not None and (counted[:, 1:] & (attention_mask[:, :-1] == 0)).any():
            raise ValueError(
                f"labels count a token after padding, where no logits follow from any text; make it {_IGNORED}, also of the first "
                f"real token after padding on the left"
            )
        # Some decoders shift no labels, or add losses of their own: only what names the common function is it.
        forward = inspect.unwrap(type(self._empty).forward)
        if "loss_function" not in forward.__code__.co_names or getattr(self.config, "output_router_logits", False):
            raise ValueError(
                f"the loss of {type(self._empty).__name__} is not of logits and labels alone; leave labels out, and compute it "
                f"from the logits"
            )


def _select_columns(logits_to_keep: int | Tensor, width: int) -> Tensor | None:
    """Return the columns of a batch that are kept, `[kept]` int64; None: each prompt's last token, wherever it stands.

    Raises TypeError if it is no number and no tensor; ValueError if it is below 0, or no row of columns that there
    are.
    """
    every = torch.arange(width)
    if isinstance(logits_to_keep, Tensor):
        whole = logits_to_keep.dtype in (torch.int32, torch.int64)
        if not whole or logits_to_keep.dim() != 1 or ((logits_to_keep < -width) | (logits_to_keep >= width)).any():
            raise ValueError(
                f"logits_to_keep={logits_to_keep} names columns that the {width} of input_ids have not; give whole numbers from "
                f"{-width} to {width - 1}, in one row"
            )
        return every[logits_to_keep]
    if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int):
        raise TypeError(f"logits_to_keep is {logits_to_keep!r}; give a whole number or a tensor of them")
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep} must be 0, for all tokens, or more")
    return None if logits_to_keep == 1 else every[-logits_to_keep:]
