# SPDX-License-Identifier: Apache-2.0
"""Weights of a checkpoint in a transformers model: all of them, and no number that transformers made up."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import first_line
from ..step.interface import with_attention
from .left_over import LeftOver, Read
from .mapped import reading_mapped_files


logger = logging.getLogger(__name__)

# Errors of transformers for weights that it does not expect.
_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, SafetensorError)


@dataclass(frozen=True)
class ReadModel:
    """A model, and transformers' report on the tensors that it read.

    Missing and mismatched ones, with the shapes found and expected, are random numbers. Unexpected ones have no place in the model. Untied are
    pairs of names that the config ties, with different tensors.
    """

    model: PreTrainedModel
    source: str
    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    unexpected: tuple[str, ...]
    untied: tuple[tuple[str, str], ...]

    def check_complete(self, tensors: Mapping[str, Tensor], model: PreTrainedModel, read: Read) -> None:
        """Raise ValueError where `model`, a part or all of the `tensors`, has one that was made up, or lacks one of the checkpoint's."""
        used = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        of_part = {name for name, tensor in tensors.items() if id(tensor) in used}
        found = LeftOver(self.model, of_part, tensors.keys() - of_part, read).without_a_reason(self.unexpected)
        lacking = [name for name in self.missing if id(tensors[name]) in used]
        if lacking:
            holding = f" and holds {_some_names(found)} without a place" if found else ""
            raise ValueError(
                f"{self.source} lacks {_some_names(lacking)}, which {type(model).__name__} needs{holding}; download the checkpoint again, or "
                f"correct its config.json"
            )
        for name, stored, expected in self.mismatched:
            if id(tensors[name]) in used:
                raise ValueError(
                    f"{self.source}: {name} has the shape {list(stored)}, and by its config.json {type(model).__name__} needs "
                    f"{list(expected)}; correct one of them"
                )
        if found:
            raise ValueError(
                f"{self.source} holds {_some_names(found)}, for which {type(model).__name__} has no place by its config.json: without it this "
                f"would be another model; correct config.json, or remove useless tensors from the file"
            )
        for name, other in self.untied:
            logger.warning(
                f"{self.source} holds {name} and {other} with other numbers, and its config says by tie_word_embeddings=true that they are "
                f"one; both are taken, as transformers does"
            )


def read_model(
    auto_class: Any,
    folder: Path | None,
    source: str,
    attention: str,
    config: PreTrainedConfig,
    options: dict[str, Any],
    *,
    mapped: bool = False,
) -> ReadModel:
    """Load a checkpoint by a class of transformers, with the attention of a name; raise ValueError where transformers cannot.

    `folder` is None where `options` of `from_pretrained` have its tensors. Unchanged tensors of a `mapped` one stay in its files.
    """
    reporting, report = {"output_loading_info": True, "ignore_mismatched_sizes": True}, dict[str, Any]()
    left_over: set[str] = set()

    def read_with(name: str) -> PreTrainedModel:
        left_over.clear()
        model: PreTrainedModel
        model, found = auto_class.from_pretrained(
            folder, **options, **reporting, config=copy.deepcopy(config), attn_implementation=name
        )
        report.update(found)
        # Pairs of names that transformers was to tie, and did not because their tensors differ.
        asked = model.get_expanded_tied_weights_keys(all_submodels=True)
        report["untied"] = {pair for pair in asked.items() if pair[0] not in model.all_tied_weights_keys}
        return model

    try:
        with _reporting_to(left_over), reading_mapped_files() if mapped else nullcontext():
            model = with_attention(read_with, attention)
    except _FAILURES as error:
        raise ValueError(f"{source}: {first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    kinds = (report["missing_keys"], report["mismatched_keys"], left_over, report["untied"])
    missing, mismatched, unexpected, untied = (tuple(sorted(names)) for names in kinds)
    return ReadModel(model, source, missing, mismatched, unexpected, untied)


@contextmanager
def _reporting_to(left_over: set[str]) -> Iterator[None]:
    """Collect the names of all tensors without a place, also those that a class lists, in the place of transformers' table."""
    original = PreTrainedModel._adjust_missing_and_unexpected_keys
    reporter = logging.getLogger("transformers.modeling_utils")

    def adjust(model: PreTrainedModel, info: Any) -> None:
        left_over.update(info.unexpected_keys)
        original(model, info)

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    PreTrainedModel._adjust_missing_and_unexpected_keys = adjust
    reporter.addFilter(is_other)
    try:
        yield
    finally:
        PreTrainedModel._adjust_missing_and_unexpected_keys = original
        reporter.removeFilter(is_other)


def cast_model(model: PreTrainedModel, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Return the model as transformers would load its weights in `dtype`, some of which stay float32, with another attention."""
    options: dict[str, Any] = {"config": model.config, "state_dict": model.state_dict(), "dtype": dtype}
    cast = with_attention(
        lambda name: type(model).from_pretrained(None, attn_implementation=name, **options), attention
    )
    cast.generation_config = getattr(model, "generation_config", None)
    return cast


def _some_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
