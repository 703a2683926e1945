# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: the weights of a checkpoint become a transformers model with our attention."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

from ..parity.nonfinite import describe_nonfinite
from ..step.interface import ATTENTION_NAME, set_implementation
from .checkpoint_config import CheckpointConfig
from .files import StoredWeights, check_weight_files, shapes_by_file
from .formats import DEQUANTIZE, DEQUANTIZED, KEEP, open_quantized, quantization_of
from .formats.format import CheckpointFormat
from .gguf.weights import GgufFile
from .kept import keep_codes, read_dequantized
from .language_model import take_text_part
from .left_over import check_unique, make_reader, renamed_by_wrappers
from .mapped import DTYPES, NAMED
from .read import ReadModel, cast_model, read_model


logger = logging.getLogger(__name__)

# Weights that the files lack may be filled in by transformers (tied ones), and are then looked for by name.
_TIMES_STORED = 2
# Without scales.
_BYTES_OF_A_CODE = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
# transformers joins the weights of experts that a checkpoint has one by one.
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


class Checkpoint(CheckpointConfig):
    """A checkpoint on the local disk, with weights for a transformers model."""

    def load_model(
        self, dtype: str, merges: Sequence[Callable[[PreTrainedModel], PreTrainedModel]] = ()
    ) -> PreTrainedModel:
        """Return the language model in `dtype` ("auto": the checkpoint's own), with adapters merged by `merges` in turn, in float32.

        Raise ValueError where weights are incomplete, or cannot be loaded, merged or taken out of a multimodal model; FileNotFoundError without them.
        """
        stored = self._check_weights()
        if self.codes is not None and not self.is_quantized:
            raise ValueError(
                f"{self.source} is not quantized, and is to {self.codes} its codes; leave out --quantization checkpoint and --dequantize"
            )
        if self.is_quantized and self.codes != DEQUANTIZE and merges:
            raise ValueError(
                f"{self.source} is quantized, and an adapter is merged into plain weights; pass --dequantize (dequantize=True)"
            )
        wanted, multimodal = self.resolve_dtype(self.load_config(), dtype), self._is_multimodal
        read = self._read(stored, wanted, exact=bool(merges))
        check_unique(stored.names, read.model.base_model_prefix, self.source)
        model, target = read.model, read.model.dtype if wanted is None else NAMED[wanted]
        nonfinite = describe_nonfinite(model) if multimodal or merges else None
        if nonfinite:  # comparing before and after would blame what is done in between
            raise ValueError(f"{self.source}: {nonfinite}")
        if merges:
            model = model.float()
        for merge in merges:
            model = merge(model)
        if merges or self._method in DEQUANTIZED:
            model = cast_model(model, target, "eager" if multimodal else ATTENTION_NAME)
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        if multimodal:
            model = take_text_part(model, self.source)
            set_implementation(model, ATTENTION_NAME)
        read.check_complete(tensors, model, make_reader(self.folder, self.source))
        if self.is_quantized and self.codes != DEQUANTIZE:
            all_of_them = self.codes == KEEP or self.gguf_file is None
            keep_codes(model, self._form, self.source, all_of_them=all_of_them, without=frozenset(read.unexpected))
        return model.eval().requires_grad_(False)

    def least_bytes(self, dtype: str, quantization: str | None) -> int:
        """Return how many bytes of a disk an export takes at least, from the headers of the files; 0 where these do not say it.

        That is the artifact, and weights that lie in files meanwhile: cast ones, joined experts and codes. Raise as `load_model`.
        """
        if not self.is_plain:
            return 0
        wanted, written, meanwhile = self.resolve_dtype(self.load_config(), dtype), 0.0, 0.0
        for shapes in shapes_by_file(self.folder, self.source).values():
            for name, (shape, stored) in shapes.items():
                own, count = DTYPES.get(stored), math.prod(shape)
                if own is None or not own.is_floating_point:
                    continue
                made = own if wanted is None else NAMED[wanted]
                codes = count * _BYTES_OF_A_CODE.get(quantization or "", 0) if len(shape) > 1 else 0
                written += codes or count * made.itemsize
                meanwhile += codes + (count * made.itemsize if made != own or _ONE_EXPERT.search(name) else 0)
        return int(written + meanwhile)

    def _read(self, stored: StoredWeights, dtype: str | None, *, exact: bool) -> ReadModel:
        """Read the whole model; with `exact`, its weights as they are or wider."""
        config, method, renamed = self._whole_config, self._method, renamed_by_wrappers(stored.names)
        # Merging and taking a part are checked by running the model before and after, with attention that needs no cache.
        attention = "eager" if self._is_multimodal or exact else ATTENTION_NAME
        if self.gguf is None and method in (None, *DEQUANTIZED):
            asked = torch.float32 if exact and dtype else NAMED[dtype] if dtype else "auto"
            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "dtype": asked}
            if renamed:
                options["key_mapping"] = renamed
            if method is not None:
                options["quantization_config"] = AutoQuantizationConfig.from_dict(
                    dict(quantization_of(self._document, self.source)) | {"dequantize": True}
                )
            # An adapter is added to weights where they lie, and a checkpoint's own code may do anything.
            mapped = not exact and not self.trust_remote_code
            return read_model(self._auto_class, self.folder, self.source, attention, config, options, mapped=mapped)
        if self._is_multimodal:
            raise ValueError(
                f"{self.source} is a multimodal checkpoint quantized by {method}, of which the language model is not read; export the "
                f"checkpoint that it was made from"
            )
        made = torch.float32 if exact else NAMED[dtype or ("bfloat16" if self.gguf is None else "float32")]
        return read_dequantized(self._form, self.source, attention, self.load_config(), made, renamed)

    @cached_property
    def _form(self) -> CheckpointFormat:
        if self.gguf is not None:
            file = GgufFile(self.gguf, self.empty_model)
            file.check_accounted(self._read_config[1])
            return file
        form = open_quantized(self._document, self.folder, self.source)
        for notice in () if self.codes == DEQUANTIZE else form.notices:
            logger.warning("%s", notice)
        return form

    def _check_weights(self) -> StoredWeights:
        """Check before a model is built that the weights are there, and before they are read that they are as many as the config names."""
        stored = check_weight_files(self.folder, self.source) if self.gguf is None else self.gguf.stored
        layers = getattr(self.load_config(), "num_hidden_layers", None) or 0
        if layers > stored.tensors:
            raise ValueError(
                f"{self.source}: its config names {layers} layers, and its weights are {stored.tensors} tensors; correct the config, or "
                f"download the checkpoint again"
            )
        model = self.empty_model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if parameters > _TIMES_STORED * stored.elements:
            raise ValueError(
                f"{self.source}: its config describes {type(model).__name__} with {parameters:,} parameters, and its weights hold "
                f"{stored.elements:,} numbers; correct the config, or download the checkpoint again"
            )
        return stored
