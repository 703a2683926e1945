# SPDX-License-Identifier: Apache-2.0
"""What tools ask of any model of transformers: its size, its type, where it is. Compiled graphs have no modules to show."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..artifacts.artifact import Artifact
from ..artifacts.skeleton import empty_model
from ..graphs.quantized.formats import weights_by_tensor
from ..graphs.quantized.modules import QuantizedEmbedding


if TYPE_CHECKING:
    from typing_extensions import Self


def make_known(name: str) -> None:
    """Tells pipelines that a class of this name generates text; without, they log the names of all classes that do."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("neuron", name)


class Module:
    """The part of `PreTrainedModel` that compiled graphs can answer; what they cannot is refused by name."""

    artifact: Artifact
    config: Any
    dtype: torch.dtype
    main_input_name = "input_ids"
    input_modalities = ("text",)
    training = False
    _trust_remote_code: bool

    def __getattr__(self, name: str) -> Any:
        if hasattr(PreTrainedModel, name):
            raise AttributeError(
                f"{type(self).__name__} has no {name}: its layers and weights are compiled into the artifact; use device, "
                f"dtype and num_parameters(), or load the checkpoint with transformers"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def name_or_path(self) -> str:
        """Where the model was loaded from."""
        return self.config.name_or_path

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As transformers counts them: tied ones once, and none of them trainable. A quantized weight counts as the plain one."""
        if only_trainable:
            return 0
        named, kinds = self._empty.named_modules(), nn.Embedding | QuantizedEmbedding
        tables = tuple(f"model.{name}." for name, module in named if exclude_embeddings and isinstance(module, kinds))
        shared = {stored for alias, stored in self.artifact.tied_weights.items() if alias.startswith(tables)}
        counts = {f"model.{name}": count for name, (_, count) in self._weights.items()}
        return sum(count for name, count in counts.items() if name not in shared and not name.startswith(tables))

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the model's parameters and buffers, as transformers counts them: without the cache of the slots."""
        weights = self._weights
        others = [tensor for name, tensor in self._empty.named_buffers() if name not in weights_by_tensor(self._empty)]
        tensors = [*(tensor for tensor, _ in weights.values()), *(others if return_buffers else ())]
        return sum(tensor.nbytes for tensor in tensors)

    @cached_property
    def _empty(self) -> nn.Module:
        """The model of config.json without weights."""
        return empty_model(self.artifact.path, self.artifact.config.dtype, trust_remote_code=self._trust_remote_code)

    @property
    def _weights(self) -> dict[str, tuple[Tensor, int]]:
        """By name the tensors that hold weights, and how many each stands for: the tied ones are under one name."""
        model, coded = self._empty, weights_by_tensor(self._empty)
        named = dict(model.named_parameters(remove_duplicate=False))
        named |= {name: tensor for name, tensor in model.named_buffers(remove_duplicate=False) if name in coded}
        stored = {name: tensor for name, tensor in named.items() if f"model.{name}" not in self.artifact.tied_weights}
        return {name: (tensor, coded.get(name, tensor.numel())) for name, tensor in stored.items()}

    def can_generate(self) -> bool:
        return True

    def eval(self) -> Self:
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns self where `mode` is False.

        Raises:
            ValueError: graphs that are compiled for inference do not learn.
        """
        if mode:
            raise ValueError(
                "compiled graphs cannot be trained; train the checkpoint with transformers and export it again"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Returns self where `requires_grad` is False; raises ValueError as `train` does."""
        return self.train(requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns self: compiled graphs stay where they were compiled for.

        Raises:
            ValueError: another dtype than theirs.
        """
        for wanted in (*args, *kwargs.values()):
            if isinstance(wanted, torch.dtype) and wanted != self.dtype:
                name = str(wanted).removeprefix("torch.")
                raise ValueError(
                    f"the graphs compute in {self.artifact.config.dtype} and cannot change to {name}; export the checkpoint "
                    f"again with --dtype {name}"
                )
        return self

    def cpu(self) -> Self:
        return self

    def cuda(self, device: Any = None) -> Self:
        """Returns self, as `to` does."""
        return self

    def float(self) -> Self:
        return self.to(torch.float32)

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)
