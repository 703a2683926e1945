# SPDX-License-Identifier: Apache-2.0
"""The text on which weights are rounded, and the importance of weights' inputs on it: the mean square of each input.

An error of a weight reaches the output times its input. Of two weights with one scale, the one with the larger input should be nearer. A
model's large inputs are nearly the same on any text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import progress
from ...config import NeuronConfig
from ...errors import first_line
from ...parity.comparison_runs import own_attention
from ...step.features.codes.modules import natural_shape, plain_weights
from ...step.features.experts.experts import ExpertsCall, routing, set_experts, watched_experts
from ...step.one_thread import one_thread
from ..checkpoint import Checkpoint
from ..mapped import WritableWhereWritten, giving_back


# Tokens of a sequence and sequences, at most: what layers get of so many is in memory at a time.
_LENGTH, _SEQUENCES = 512, 16
# Fewer say little of what a layer's inputs have in common.
LEAST_TOKENS = 512
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Calibration:
    """Tokens `[sequences, tokens]` int64 of a text, and the digest of its file."""

    ids: Tensor
    sha256: str


def read_calibration(path: str | Path, checkpoint: Checkpoint, config: NeuronConfig) -> Calibration:
    """Return sequences that lie evenly in a text in UTF-8, each with the tokenizer's beginning of a text.

    Raise ValueError where weights are not rounded to int4, the text or the tokenizer does not fit; FileNotFoundError without such a file.
    """
    path = Path(path).expanduser()
    if config.quantization != "int4":
        raise ValueError(
            f"quantization_calibration={str(path)!r} is a text on which weights are rounded to int4, and quantization={config.quantization!r}; "
            f"leave it out, or pass --quantization int4 (quantization='int4')"
        )
    data, text = _read_text(path)
    tokenizer: Any = checkpoint.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{checkpoint.source} has no tokenizer, and weights are to be rounded on a text; add its files (tokenizer.json and its like), or "
            f"leave out --quantization-calibration"
        )
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    begin = first if first == [tokenizer.bos_token_id] else []
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, and weights are rounded on {LEAST_TOKENS} of them at least; name a longer text"
        )
    sizes = checkpoint.load_config().get_text_config(decoder=True)
    vocabulary = getattr(sizes, "vocab_size", None)
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise ValueError(
            f"{checkpoint.source}: its tokenizer makes the token {max(tokens)} of {path}, and the model has {vocabulary}; restore the "
            f"tokenizer's files"
        )
    longest = getattr(sizes, "max_position_embeddings", None) or _LENGTH
    length = min(max(1, min(_LENGTH, longest if longest > 0 else _LENGTH) - len(begin)), len(tokens))
    count = min(_SEQUENCES, len(tokens) // length)
    starts = [(len(tokens) - length) * number // max(1, count - 1) for number in range(count)]
    ids = torch.tensor([[*begin, *tokens[start : start + length]] for start in starts])
    return Calibration(ids, hashlib.sha256(data).hexdigest())


def _read_text(path: Path) -> tuple[bytes, str]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise FileNotFoundError(f"{path}, a text to round weights on, {what}; name a file of text in UTF-8")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, and a text to round weights on {_MOST_BYTES:,} at most, of which {_LENGTH * _SEQUENCES:,} tokens "
            f"are taken; name a part of it"
        )
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it, or name another file"
        ) from error
    if "\0" in text:
        raise ValueError(f"{path} is no text: byte {data.index(0)} is 0; name a file of text in UTF-8")
    if not text.strip():
        raise ValueError(f"{path} is empty, and weights are to be rounded on its text; name another file")
    return data, text


# The mean square of fewer tokens, such as those of a rare expert, is chance.
_LEAST_TOKENS = 64
# The least importance, as a share of the mean over a layer's inputs: an input that is 0 on one text need not be on another.
_LEAST_SHARE = 1e-2


def input_importance(model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor) -> dict[str, Tensor]:
    """Return `[inputs]` of linear `layers`, `[experts, inputs]` of weights of experts, by name, for `round_int4`.

    One thread runs the sequences: the same text gives the same bits. A weight that met too few tokens has no importance, and an expert that did
    the mean of the others. Raise ValueError where the model cannot run on the text, or inputs are not finite.
    """
    seen = _InputSquares()
    set_experts(model)
    with ExitStack() as stack:
        for each in (torch.no_grad(), one_thread(), giving_back(), WritableWhereWritten(), own_attention(model)):
            stack.enter_context(each)
        _watch_layers(layers, seen, stack)
        # The head has a weight as large as many layers' and is not int4.
        if (head := model.get_output_embeddings()) is not None:
            stack.callback(head.register_forward_pre_hook(_end_run).remove)
        advance = stack.enter_context(progress.stage("Running the calibration text", len(ids)))
        for number, sequence in enumerate(ids, 1):
            try:
                model(input_ids=sequence[None], use_cache=False)
            except _EndedError:
                pass
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{type(model).__name__} cannot run on a text of {len(sequence)} tokens ({first_line(error)}); leave out "
                    f"--quantization-calibration"
                ) from error
            advance(f"sequence {number}")
    return seen.importance()


class _EndedError(Exception):
    """The model has come to its head."""


def _end_run(*_: object) -> NoReturn:
    raise _EndedError


def _watch_layers(layers: Mapping[str, nn.Module], seen: _InputSquares, stack: ExitStack) -> None:
    names = {module: name for name, module in layers.items()}
    has_experts = False

    def watch_linear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.add_inputs(f"{names[module]}.weight", args[0] if args else kwargs["input"])

    def watch_experts(call: ExpertsCall) -> Tensor:
        name = names.get(call.layer)
        return watched_experts(
            call, lambda own, expert, x: None if name is None else seen.add_inputs(f"{name}.{own}", x, expert)
        )

    for name, module in layers.items():
        if isinstance(module, nn.Linear):
            stack.callback(module.register_forward_pre_hook(watch_linear, with_kwargs=True).remove)
            continue
        has_experts = True
        for own, weight in plain_weights(module).items():
            seen.expect_inputs(f"{name}.{own}", *natural_shape(module, weight)[::2])
    if has_experts:
        stack.enter_context(routing(watch_experts))


class _InputSquares:
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
