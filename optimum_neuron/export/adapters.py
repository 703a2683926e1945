# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters, merged into a checkpoint's weights before they are exported."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..artifact.filesystem import file_sha256
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.files import TOKENIZER_FILES, check_documents, read_object, read_shapes
from ..checkpoints.find import ADAPTER_CONFIG as CONFIG_NAME
from ..checkpoints.hub import download
from ..checkpoints.language_model import text_prompt
from ..errors import first_line


logger = logging.getLogger(__name__)

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLED_NAME = "adapter_model.bin"
# Largest difference of the merged model's logits from those with the adapter apart, as a part of their range, in float32.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter on the local disk; made by `find_adapters`. `source` is the user's name of it, `base` that of the model it was trained on."""

    folder: Path
    source: str
    peft_type: str
    base: str | None

    def warn_of_other_base(self, checkpoint: Checkpoint) -> None:
        """Warn of another name of the base; the models may be the same, and `merge` refuses an adapter that does not fit."""
        if self.base is not None and Path(self.base).name != Path(checkpoint.source).name:
            logger.warning(
                f"adapter {self.source} was trained on {self.base}, and is merged into {checkpoint.source}; make sure that these are the same"
            )

    def record(self) -> dict[str, Any]:
        digests = {name: file_sha256(self.folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME)}
        return {"source": self.source, "peft_type": self.peft_type, "sha256": digests}

    def merge(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a float32 model, which is used up, with the adapter in its weights; ValueError where it does not fit or cannot be merged."""
        from peft import PeftModel

        self._resize_embeddings(model)
        ties, prompt = _Ties(model), text_prompt(model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT's warnings are checked here
            try:
                adapted = PeftModel.from_pretrained(model, str(self.folder), autocast_adapter_dtype=False).eval()
            except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
                raise ValueError(
                    f"adapter {self.source} does not fit {type(model).__name__}: {first_line(error)}"
                ) from error
            self._check_loaded(adapted, type(model).__name__)
            ties.cut_ties(adapted.get_base_model())
            with torch.inference_mode():
                expected = adapted(input_ids=prompt, use_cache=False).logits
            try:
                merged = adapted.merge_and_unload(safe_merge=True)
            except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"adapter {self.source} ({self.peft_type}) cannot be merged: {first_line(error)}"
                ) from error
        self._check_merged(merged, prompt, expected)
        ties.restore_ties(merged)
        return merged

    def _resize_embeddings(self, model: PreTrainedModel) -> None:
        """Resize embeddings and head for an adapter that was trained with new tokens, and brings as many rows."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        name, head_name = names[embeddings], names.get(head, "")
        shapes = {key: shape for key, (shape, _) in read_shapes(self.folder / WEIGHTS_NAME).items()}
        rows = {shape[0] for key, shape in shapes.items() if key.endswith(f"{name}.weight") and "lora" not in key}
        if not rows or rows == {embeddings.weight.shape[0]}:
            return
        tied = head is None or head.weight is embeddings.weight
        if not tied and not any(key.endswith(f"{head_name}.weight") for key in shapes):
            raise ValueError(
                f"adapter {self.source} changes the number of embeddings to {max(rows)} and holds no head of this size; save it "
                f"with save_embedding_layers=True"
            )
        model.resize_token_embeddings(max(rows), mean_resizing=False)

    def _check_loaded(self, adapted: Any, name: str) -> None:
        """Refuse an adapter where PEFT only warns: of tensors without a place, and of those that it made up."""
        from peft import get_peft_model_state_dict
        from peft.utils.save_and_load import load_peft_weights

        held = load_peft_weights(str(self.folder), device="cpu").keys()
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        homeless = sorted(held - own - get_peft_model_state_dict(adapted, save_embedding_layers=True).keys())
        lacking = sorted(own - held)
        if homeless:
            raise ValueError(
                f"adapter {self.source} does not fit {name}, which has no place for {homeless[0]} ({len(homeless)} of its "
                f"{len(held)} tensors); export the model that it was trained on, {self.base}"
            )
        if lacking:
            raise ValueError(
                f"adapter {self.source} lacks {lacking[0]} ({len(lacking)} tensors); download or save it again"
            )

    def _check_merged(self, model: PreTrainedModel, prompt: Tensor, expected: Tensor) -> None:
        refusal = f"adapter {self.source} ({self.peft_type}) cannot be merged"
        for name, module in model.named_modules():
            if type(module).__module__.startswith("peft."):
                raise ValueError(f"{refusal}: {name} stays apart from the weights")
        with torch.inference_mode():
            logits = model(input_ids=prompt, use_cache=False).logits
        difference = float((logits - expected).abs().max() / (expected.max() - expected.min()).clamp(min=1e-30))
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"{refusal}: the merged model's logits differ by {difference:.1g} of their range from those with the adapter apart from "
                f"the weights"
            )


class _Ties:
    """Names of a model's parameters that are one tensor. Merging into one of them must not change the others."""

    def __init__(self, model: PreTrainedModel) -> None:
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        self._groups = {key: group for key, group in names.items() if len(group) > 1}
        self._tied_by_config = [getattr(config, "tie_word_embeddings", False) for config in _configs_of(model)]

    def cut_ties(self, model: nn.Module) -> None:
        seen = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in self._groups and parameter is not None:
                    if id(parameter) in seen:
                        module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                    seen.add(id(parameter))

    def restore_ties(self, model: PreTrainedModel) -> None:
        """Tie equal tensors again, and have the configs, which PEFT changes, say whether those are all."""
        are_all = True
        for name, *others in self._groups.values():
            first = model.get_parameter(name)
            if not all(torch.equal(first, model.get_parameter(other)) for other in others):
                are_all = False
                continue
            for other in others:
                owner, _, member = other.rpartition(".")
                model.get_submodule(owner)._parameters[member] = first
        for config, was_tied in zip(_configs_of(model), self._tied_by_config, strict=True):
            config.tie_word_embeddings = was_tied and are_all


def _configs_of(model: PreTrainedModel) -> tuple[Any, Any]:
    return model.config, model.config.get_text_config(decoder=True)


def find_adapters(
    adapter: str | Path | Sequence[str | Path] | None, *, token: str | bool | None, **hub: Any
) -> tuple[PeftAdapter, ...]:
    """Find adapters by folders and Hub ids, before any weights are loaded; `hub` are options of the Hub's download functions.

    Raise ValueError where one cannot be merged, FileNotFoundError where nothing has its name, RuntimeError where PEFT is not installed.
    """
    if adapter is None:
        return ()
    names = [adapter] if isinstance(adapter, (str, Path)) else list(adapter)
    try:
        if names:
            import peft  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "merging an adapter needs PEFT, which is not installed; pip install 'optimum-neuron-runtime[peft]'"
        ) from error
    return tuple(_find_adapter(str(name), token=token, **hub) for name in names)


def _find_adapter(name: str, *, token: str | bool | None, **hub: Any) -> PeftAdapter:
    folder = Path(name).expanduser()
    if not folder.exists():
        folder = download(name, [CONFIG_NAME, WEIGHTS_NAME, *TOKENIZER_FILES], revision=None, token=token, **hub)
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{name} holds no {CONFIG_NAME}; name the folder or Hub id of a PEFT adapter")
    if not (folder / WEIGHTS_NAME).is_file():
        if (folder / PICKLED_NAME).is_file():
            raise ValueError(
                f"adapter {name} holds its weights as {PICKLED_NAME}, a format that may run code; save it again by PEFT, as "
                f"{WEIGHTS_NAME}"
            )
        raise FileNotFoundError(f"adapter {name} holds no {WEIGHTS_NAME}")
    check_documents(folder)
    _check_rank(folder)
    config = _read_config(folder, name)
    return PeftAdapter(folder, name, config.peft_type.value, config.base_model_name_or_path)


def _check_rank(folder: Path) -> None:
    """Refuse ranks above all sizes of the weights: PEFT makes matrices of the config's ranks before it looks at the weights."""
    config = read_object(folder / CONFIG_NAME)
    shapes = [shape for shape, _ in read_shapes(folder / WEIGHTS_NAME).values()]
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    largest = max((size for shape in shapes for size in shape), default=0)
    above = next((rank for rank in ranks if isinstance(rank, int) and rank > largest), None)
    if above is not None:
        raise ValueError(
            f"{folder / CONFIG_NAME} names the rank {above}, and no tensor of {WEIGHTS_NAME} has more than {largest} rows or "
            f"columns; save the adapter again"
        )


def _read_config(folder: Path, name: str) -> Any:
    from peft import PeftConfig

    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # PEFT checks little of what it reads
        raise ValueError(
            f"{folder / CONFIG_NAME} is no configuration that the installed PEFT knows ({first_line(error)}); save the adapter "
            f"again, or install a newer PEFT"
        ) from error
    if config.peft_type is None:
        raise ValueError(f"{folder / CONFIG_NAME} names no peft_type; save the adapter again")
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"adapter {name} ({config.peft_type.value}) adds to the context instead of changing weights, so it cannot be merged; "
            f"train an adapter that changes weights, as LoRA"
        )
    return config
