# SPDX-License-Identifier: Apache-2.0
"""The size, type and place of a model, as tools ask any model of transformers for them. Compiled graphs have no modules to show."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..artifact.artifact import Artifact
from ..artifact.skeleton import empty_model
from ..step.features.codes.modules import coded_tensors


if TYPE_CHECKING:
    from typing_extensions import Self


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
        """Return the count as transformers has it: tied ones once, and none of them trainable. A quantized weight counts as the plain one."""
        if only_trainable:
            return 0
        plain = self._model_without_weights(coded=False)
        tables = {f"{name}.weight" for name, module in plain.named_modules() if isinstance(module, nn.Embedding)}
        skipped = tables if exclude_embeddings else ()
        return sum(tensor.numel() for name, tensor in plain.named_parameters() if name not in skipped)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of the model's parameters and buffers, as transformers counts them: without the cache of the slots."""
        model, codes = self._empty, coded_tensors(self._empty)
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in model.named_buffers(remove_duplicate=False):
            if return_buffers or name in codes:
                named[name] = tensor
        return sum(each.nbytes for name, each in named.items() if f"model.{name}" not in self.artifact.tied_weights)

    @cached_property
    def _empty(self) -> nn.Module:
        return self._model_without_weights(coded=True)

    def _model_without_weights(self, *, coded: bool) -> nn.Module:
        path, dtype = self.artifact.path, self.artifact.config.dtype
        return empty_model(path, dtype, trust_remote_code=self._trust_remote_code, coded=coded)

    def can_generate(self) -> bool:
        return True

    def eval(self) -> Self:
        return self

    def train(self, mode: bool = True) -> Self:
        """Return self where `mode` is False; raise ValueError for True: graphs that are compiled for inference do not learn."""
        if mode:
            raise ValueError(
                "compiled graphs cannot be trained; train the checkpoint with transformers and export it again"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Return self where `requires_grad` is False; raises ValueError as `train` does."""
        return self.train(requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return self, as compiled graphs stay where they were compiled for; raise ValueError for another dtype than theirs."""
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
        return self

    def float(self) -> Self:
        return self.to(torch.float32)

    def half(self) -> Self:
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        return self.to(torch.bfloat16)
