# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint that its model has no place for: each has no effect for a listed reason, or the export refuses it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .formats.format import TensorFiles


Read = Callable[[str], Tensor]

# Names that programs for training put around a model's own, wherever they stand, and before all names of a file.
_WRAPPERS = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_OF_ALL = "module."
# Tensors that no logit of the language model depends on.
_WITHOUT_EFFECT = {
    r"(?:^|\.)(?:model\.)?mtp(?:_\w+)?\.": "layers that predict further tokens",
    r"\._extra_state$": "notes of a library for training",
    r"(?:^|\.)v_head\.": "a value head of training",
    r"(?:^|\.)(?:visual|vision|vision_\w+|audio|audio_\w+|speech_\w+|multi_modal_projector|mm_projector|img_processor)\.": (
        "parts for images and sound"
    ),
}
# Programs that quantize layers give each of them one, of zeros where the layer has none.
_BIAS = re.compile(r"(?<!attn)(?<!attention)\.bias$")
# Names that models use no tensor for, and whether a tensor is what its name says.
_COMPUTED: dict[str, Callable[[Tensor], bool]] = {
    r"(?:^|\.)position_ids$": lambda found: torch.equal(found.flatten().long(), torch.arange(found.numel())),
    # One number, as checkpoints for caches of 8 bits have them.
    r"(?:attn|attention)\.(?:\w+\.)?(?:[qkv]|prob|output|kv)_scale$": lambda found: found.numel() == 1,
    r"(?:attn|attention)\.(?:bias|masked_bias|causal_mask)$": lambda found: (
        found.numel() == 1 or (found.dim() == 4 and found.shape[-1] == found.shape[-2])
    ),
}
_LAYER = re.compile(r"((?:.*\.)?layers\.(\d+)\.)")
# A pattern of names with the number of a layer.
_NUMBERED = re.compile(r"layers\\?\.\d")
# DeepSeek-V3, section 2.2: a layer that predicts a further token projects an embedding joined to a hidden state.
_OF_FURTHER_TOKENS = "eh_proj.weight"


def renamed_by_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return replacements by pattern that make a file's names the model's own; none where they are."""
    found = {_WRAPPERS: ""} if any(re.search(_WRAPPERS, name) for name in names) else {}
    if names and all(re.sub(_WRAPPERS, "", name).startswith(_OF_ALL) for name in names):
        found[rf"^{re.escape(_OF_ALL)}"] = ""
    return found


def check_unique(names: Collection[str], prefix: str, source: str) -> None:
    """Raise ValueError where two names of a file mean one tensor, with or without a `prefix` that transformers accepts and omits."""
    found: dict[str, str] = {}
    for name in sorted(names):
        bare = re.sub(_WRAPPERS, "", name).removeprefix(_OF_ALL).removeprefix(f"{prefix}.")
        other = found.setdefault(bare, name)
        if other != name:
            raise ValueError(f"{source} holds {other} and {name}, which are one tensor of its model; remove one")


def make_reader(folder: Path, source: str) -> Read:
    """Return a reader of a checkpoint's tensors that opens the files for the first one, and finds names with or without a part before."""
    files = cache(partial(TensorFiles, folder, source))

    def read_tensor(name: str) -> Tensor:
        names = files().names
        alike = (each for each in names if each.endswith(f".{name}") or name.endswith(f".{each}"))
        found = name if name in names else next(alike, None)
        return torch.empty(0) if found is None else files().read_tensor(found)

    return read_tensor


class LeftOver:
    """A judge of tensors that a model has no place for: does a logit depend on one? The model's own are `of_part` if exported, or `others`."""

    def __init__(self, model: PreTrainedModel, of_part: Collection[str], others: Collection[str], read: Read) -> None:
        self._of_part, self._others, self._read = _modules_of(of_part), _modules_of(others), read
        # Names that the model's code ignores; a class's pattern with the number of a layer fits one checkpoint only.
        classes = [type(each) for each in model.modules() if isinstance(each, PreTrainedModel)]
        listed = {name for each in classes for name in each._keys_to_ignore_on_load_unexpected or ()}
        ignored = set(model._keys_to_ignore_on_load_unexpected or ()) - {
            each for each in listed if _NUMBERED.search(each)
        }
        self._patterns = re.compile("|".join(f"(?:{each})" for each in (*_WITHOUT_EFFECT, *ignored)))
        self._buffers = dict(model.named_buffers())
        self._frequencies = [each for name, each in self._buffers.items() if name.endswith("inv_freq")]
        config = model.config.get_text_config(decoder=True)
        self._layers = getattr(config, "num_hidden_layers", 0)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = [each for each in parameters.values() if isinstance(each, dict)]
        self._bases = [each["rope_theta"] for each in (parameters, *nested) if "rope_theta" in each]

    def without_a_reason(self, names: Collection[str]) -> list[str]:
        """Return the names without a place that the model may need, sorted."""
        further = {match[1] for name in names if name.endswith(_OF_FURTHER_TOKENS) and (match := _LAYER.match(name))}

        def is_explained(name: str) -> bool:
            layer = _LAYER.match(name)
            if layer and layer[1] in further and int(layer[2]) >= self._layers:
                return True
            if _BIAS.search(name) and (bias := self._read(name)).numel() and not bias.any():
                return True
            checked = self._is_computed(name)
            if checked is not None or self._patterns.search(name):
                return checked is not False
            # Explained where the innermost module of the name that has tensors lies outside of the exported part.
            parts = name.split(".")
            modules = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
            innermost = next((each for each in modules if each in self._of_part or each in self._others), None)
            return innermost is not None and innermost not in self._of_part

        return sorted(name for name in names if not is_explained(name))

    def _is_computed(self, name: str) -> bool | None:
        """Return whether a tensor that models compute is what its name says; None for every other name."""
        if name in self._buffers:
            return _is_near(self._read(name), self._buffers[name])
        if re.search(r"(?:^|\.)inv_freq$", name):
            found = self._read(name)
            plain = [base ** -torch.linspace(0, 1, len(found) + 1)[:-1] for base in self._bases] if found.dim() else []
            return any(_is_near(found, each) for each in (*self._frequencies, *plain))
        is_right = next((each for pattern, each in _COMPUTED.items() if re.search(pattern, name)), None)
        return None if is_right is None else is_right(self._read(name))


def _modules_of(names: Collection[str]) -> set[str]:
    return {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}


def _is_near(found: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are the same, but for their rounding."""
    if found.shape != expected.shape:
        return False
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    return torch.allclose(found.float(), expected.float(), rtol=max(4 * eps, 1e-5), atol=1e-7)
