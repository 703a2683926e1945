# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in files, and how it becomes a transformers model with our attention."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers import AutoQuantizationConfig

from ..errors import first_line
from ..parity.parity import describe_nonfinite
from ..step.interface import ATTENTION_NAME, set_implementation
from .files import (
    INDEX_NAME,
    StoredWeights,
    check_weight_files,
    copy_files,
    describes_another,
    indexed,
    read_generation_config,
    read_object,
    replace_tokenizer,
    write_config,
)
from .formats.format import CheckpointFormat
from .gguf.config import read_config
from .gguf.header import TOKENS_KEY, GgufHeader, read_header
from .gguf.keys import sampling_of
from .gguf.weights import GgufFile
from .kept import keep_codes, read_dequantized
from .language_model import find_text_config, find_text_part, multimodal_class, take_text_part
from .left_over import check_unique, reading, renamed_by_wrappers
from .mapped import NAMED
from .quantized import DEQUANTIZE, DEQUANTIZED, KEEP, open_quantized, quantization_of
from .read import ReadModel, cast_model, read_model
from .sizes import check_layers, check_parameters, check_sizes
from .tokenizer import begin_as_in_gguf, check_tokenizer, has_tokenizer, load_tokenizer, save_tokenizer
from .unread import unread_keys


logger = logging.getLogger(__name__)


class Adapter(Protocol):
    """A change of a model's weights, as `adapters.PeftAdapter`."""

    @property
    def folder(self) -> Path: ...

    def merge(self, model: PreTrainedModel) -> PreTrainedModel: ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the local disk.

    Attributes:
        folder: holds the checkpoint's files.
        gguf_file: name of the GGUF file in `folder`, if the checkpoint is one.
        source: what the user named, kept for the record.
        codes: of a checkpoint that is quantized: `quantized.KEEP`, or `quantized.DEQUANTIZE`; None: they are kept, but for blocks of a GGUF
            file that stand for no codes and scales, which become plain weights with a notice.
    """

    folder: Path
    gguf_file: str | None
    source: str
    trust_remote_code: bool
    codes: str | None = None

    def load_config(self) -> PreTrainedConfig:
        """The config of the language model, which is a part of a multimodal checkpoint's.

        Raises:
            ValueError: the checkpoint is not one that transformers knows as a decoder, or is quantized.
            FileNotFoundError: its config cannot be read.
        """
        config = copy.deepcopy(self._whole_config)
        text_config = config if self._runs_own_code else find_text_config(config, self.source)
        if text_config.dtype is None:
            text_config.dtype = config.dtype
        if hasattr(text_config, "quantization_config"):
            del text_config.quantization_config  # the weights will be plain
        return text_config

    def warn_of_unread_keys(self) -> None:
        """Logs one line with the keys that say how a model computes, and that the config's class does not read."""
        if self.gguf_file is not None or self._runs_own_code:
            return
        whole, document = self._whole_config, self._document
        config = whole.get_text_config(decoder=True)
        if config is not whole:
            document = next((part for name, part in document.items() if getattr(whole, name, None) is config), {})
        unread = unread_keys(document, config)
        if unread:
            logger.warning(
                "%s: its config.json says %s, which %s does not read, though other models compute by it: the export computes as "
                "transformers does, without it",
                self.source,
                ", ".join(f"{json.dumps(name)[1:-1]:.60}={json.dumps(value):.60}" for name, value in unread.items()),
                type(config).__name__,
            )

    def longest_text(self, model_config: PreTrainedConfig) -> int | None:
        """The tokens that a model has positions for; None where its config names no limit."""
        longest = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        return longest if longest is not None and longest > 0 else None  # -1 stands for no limit

    def check_length(self, model_config: PreTrainedConfig, sequence_length: int) -> None:
        """Raises ValueError where a sequence is longer than the model's positions."""
        longest = self.longest_text(model_config)
        if longest is not None and longest < sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length} is longer than the model's max_position_embeddings={longest}; "
                f"lower --sequence-length"
            )

    def resolve_dtype(self, model_config: PreTrainedConfig, dtype: str) -> str | None:
        """torch's name of the type of the weights: as asked, or for "auto" the config's; None where it names none."""
        if dtype != "auto":
            return dtype
        if self.gguf_file is not None or model_config.dtype is None:
            return None
        return str(model_config.dtype).removeprefix("torch.")

    def indexed_names(self) -> frozenset[str]:
        """Names of the tensors of a checkpoint in several files; of one file, where only that tells them, none.

        Raises:
            ValueError: the index is none.
        """
        path = self.folder / INDEX_NAME
        return frozenset(indexed(path)) if path.is_file() else frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether its files hold the weights of the exported model as plain numbers, and no others."""
        return self.gguf_file is None and self._method is None and not self._is_multimodal

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint, and what is made of it, from others: of each file what changes with its content."""
        files = [self.folder / self.gguf_file] if self.gguf_file is not None else sorted(self.folder.rglob("*"))
        found = {str(path): path.stat() for path in files if path.is_file()}
        return {
            "codes": self.codes,
            "trust_remote_code": self.trust_remote_code,
            "files": {
                name: [each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns]
                for name, each in found.items()
            },
        }

    def load_model(self, dtype: str, adapters: Sequence[Adapter] = ()) -> PreTrainedModel:
        """The language model in `dtype` ("auto": the checkpoint's own), its attention replaced by the cached one.

        Args:
            adapters: merged one after another, in float32.

        Raises:
            ValueError: the weights are incomplete, or cannot be loaded, merged or taken out of a multimodal model.
            FileNotFoundError: there are no weights, or a file of them is missing.
        """
        stored = self._check_weights()
        self._check_codes(adapters)
        wanted, multimodal = self.resolve_dtype(self.load_config(), dtype), self._is_multimodal
        read = self._read(stored, wanted, exact=bool(adapters))
        check_unique(stored.names, read.model.base_model_prefix, self.source)
        model, target = read.model, read.model.dtype if wanted is None else NAMED[wanted]
        nonfinite = describe_nonfinite(model) if multimodal or adapters else None
        if nonfinite:  # comparing before and after would blame what is done in between
            raise ValueError(f"{self.source}: {nonfinite}")
        if adapters:
            model = model.float()
        for adapter in adapters:
            model = adapter.merge(model)
        if adapters or self._method in DEQUANTIZED:
            model = cast_model(model, target, "eager" if multimodal else ATTENTION_NAME)
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        if multimodal:
            model = take_text_part(model, self.source)
            set_implementation(model, ATTENTION_NAME)
        read.check_complete(tensors, model, reading(self.folder, self.source))
        if self.is_quantized and self.codes != DEQUANTIZE:
            all_of_them = self.codes == KEEP or self.gguf_file is None
            keep_codes(model, self._form, self.source, all_of_them=all_of_them, without=read.unexpected)
        return model.eval().requires_grad_(False)

    def _read(self, stored: StoredWeights, dtype: str | None, *, exact: bool) -> ReadModel:
        """Read the whole model; with `exact`, its weights as they are or wider."""
        config, method, renamed = self._whole_config, self._method, renamed_by_wrappers(stored.names)
        # Merging and taking a part are checked by running the model before and after, with attention that needs no cache.
        attention = "eager" if self._is_multimodal or exact else ATTENTION_NAME
        if self._gguf is None and method in (None, *DEQUANTIZED):
            options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
            if renamed:
                options["key_mapping"] = renamed
            options["dtype"] = torch.float32 if exact and dtype else NAMED[dtype] if dtype else "auto"
            if method is not None:
                options["quantization_config"] = AutoQuantizationConfig.from_dict(
                    dict(quantization_of(self._document, self.source)) | {"dequantize": True}
                )
            # An adapter is added to weights where they lie, and a checkpoint's own code may do anything.
            mapped = not exact and not self.trust_remote_code
            auto = self._auto_class
            return read_model(auto, self.folder, self.source, attention, config, options, mapped=mapped)
        if self._is_multimodal:
            raise ValueError(
                f"{self.source} is a multimodal checkpoint quantized by {method}, of which the language model is not read; export the "
                f"checkpoint that it was made from"
            )
        usual = "bfloat16" if self._gguf is None else "float32"
        made = torch.float32 if exact else NAMED[dtype or usual]
        return read_dequantized(self._form, self.source, attention, self.load_config(), made, renamed)

    @cached_property
    def _form(self) -> CheckpointFormat:
        """The weights of quantized safetensors files, or of a GGUF file."""
        if self._gguf is not None:
            file = GgufFile(self._gguf, self._empty_model)
            _, known = self._read_config
            file.check_accounted(known)
            return file
        form = open_quantized(self._document, self.folder, self.source)
        for notice in () if self.codes == DEQUANTIZE else form.notices:
            logger.warning("%s", notice)
        return form

    @cached_property
    def is_quantized(self) -> bool:
        """Whether its files have codes in the place of weights."""
        return self._gguf.has_codes if self._gguf is not None else self._method is not None

    def _check_codes(self, adapters: Sequence[Adapter]) -> None:
        if self.codes is not None and not self.is_quantized:
            raise ValueError(
                f"{self.source} is not quantized, and is to {self.codes} what codes it has; leave out --quantization checkpoint and "
                f"--dequantize"
            )
        if self.is_quantized and self.codes != DEQUANTIZE and adapters:
            raise ValueError(
                f"{self.source} is quantized, and an adapter is merged into plain weights; pass --dequantize (dequantize=True)"
            )

    def check_verbatim(self, adapters: Sequence[Adapter] = ()) -> GenerationConfig:
        """Reads once what `write_verbatim` will write: what no program could read in an artifact is told before it is made.

        Returns:
            The defaults of generation, which are the config's where there is no file of them.

        Raises:
            ValueError: the generation config or the tokenizer cannot be read.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            if self.gguf_file is not None:
                self._write_described(self.load_config(), folder)
            else:
                copy_files(self.folder, folder, with_code=self.trust_remote_code)
            for adapter in adapters:
                replace_tokenizer(adapter.folder, folder)
            check_tokenizer(folder, self.source, trust_remote_code=self.trust_remote_code)
            found = read_generation_config(folder, self.source)
        return GenerationConfig.from_model_config(self.load_config()) if found is None else found

    def write_verbatim(self, model: PreTrainedModel, folder: Path, adapters: Sequence[Adapter] = ()) -> None:
        """Puts config, generation config and tokenizer into `folder`.

        They are copied, except for what the checkpoint's files do not tell of the exported model, which transformers writes.
        """
        if self.gguf_file is not None:
            write_config(model, folder)
            self._write_described(model.config, folder)
        else:
            copy_files(self.folder, folder, with_code=self.trust_remote_code)
            if adapters or describes_another(folder, model):
                write_config(model, folder)
        for adapter in adapters:
            replace_tokenizer(adapter.folder, folder)

    def write_config_alone(self, folder: Path) -> None:
        """Puts what `write_verbatim` writes of the model into `folder`: its config, and its code where that is trusted. Needs no weights.

        Raises:
            ValueError: no model can be built by the config, or a multimodal one's part not be told.
        """
        copy_files(self.folder, folder, with_code=self.trust_remote_code)
        if describes_another(folder, self._empty_model):
            write_config(self._empty_model, folder)

    @cached_property
    def _empty_model(self) -> PreTrainedModel:
        """The language model on the meta device."""
        own = copy.deepcopy(self._whole_config) if self._is_multimodal else self.load_config()
        auto = self._auto_class
        try:
            with torch.device("meta"):
                model = auto.from_config(own, attn_implementation="eager", trust_remote_code=self.trust_remote_code)
        except Exception as error:  # whatever a model's code comes to by wrong numbers
            raise ValueError(
                f"{self.source}: no {own.model_type} model can be built by its config ({first_line(error)}); correct it, or "
                f"download it again"
            ) from error
        return find_text_part(model, self.source) if self._is_multimodal else model

    @property
    def _auto_class(self) -> Any:
        return multimodal_class(self._whole_config) if self._is_multimodal else AutoModelForCausalLM

    def load_tokenizer(self) -> Any:
        """The checkpoint's tokenizer; None where it has none.

        Raises:
            ValueError: its files cannot be read.
        """
        if self.gguf_file is not None:
            return self._gguf_tokenizer
        if not has_tokenizer(self.folder):
            return None
        return load_tokenizer(self.folder, self.source, trust_remote_code=self.trust_remote_code)

    def _write_described(self, config: PreTrainedConfig, folder: Path) -> None:
        """What a GGUF file says apart from the model."""
        assert self._gguf is not None
        defaults = GenerationConfig.from_model_config(config)
        defaults.update(**sampling_of(self._gguf.values))
        defaults.save_pretrained(folder)
        if self._gguf_tokenizer is not None:
            save_tokenizer(self._gguf_tokenizer, folder)

    @cached_property
    def _gguf(self) -> GgufHeader | None:
        return None if self.gguf_file is None else read_header(self.folder / self.gguf_file)

    @cached_property
    def _read_config(self) -> tuple[PreTrainedConfig, frozenset[str]]:
        assert self._gguf is not None
        return read_config(self._gguf, self.source)

    @cached_property
    def _gguf_tokenizer(self) -> Any:
        """The tokenizer of a GGUF file that has one; it takes long to make."""
        if self._gguf is None or TOKENS_KEY not in self._gguf.values:
            return None
        tokenizer = load_tokenizer(self.folder, self.source, trust_remote_code=False, gguf_file=self.gguf_file)
        begin_as_in_gguf(tokenizer, self._gguf.values)
        return tokenizer

    def _check_weights(self) -> StoredWeights:
        """Before any is read: whether they are all there, and as many as the config asks for; and what they are."""
        stored = check_weight_files(self.folder, self.source) if self._gguf is None else self._gguf.stored
        check_layers(self.load_config(), stored, self.source)
        check_parameters(self._empty_model, stored, self.source)
        return stored

    @cached_property
    def _document(self) -> dict[str, Any]:
        return read_object(self.folder / "config.json")

    @property
    def _method(self) -> str | None:
        """The quantization that its config.json names."""
        return None if self.gguf_file else quantization_of(self._document, self.source).get("quant_method")

    @cached_property
    def _whole_config(self) -> PreTrainedConfig:
        """As transformers reads it, once; not to be changed."""
        if self._gguf is not None:
            check_sizes(self._gguf.sizes(), self.source)
            return self._read_config[0]
        check_sizes(self._document, str(self.folder / "config.json"))
        quantization_of(self._document, self.source)
        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except OSError as error:
            raise FileNotFoundError(f"{self.source}: {first_line(error)}") from error
        except Exception as error:  # of a class's own code, and of the checks that transformers has it make
            if not self.trust_remote_code and "auto_map" in self._document:
                raise ValueError(
                    f"{self.source} brings modeling code of its own; read it, then pass --trust-remote-code "
                    f"(trust_remote_code=True) to run it"
                ) from error
            raise ValueError(
                f"{self.source}: its config cannot be used ({first_line(error)}); correct it, or download it again"
            ) from error

    @property
    def _runs_own_code(self) -> bool:
        own = getattr(self._whole_config, "auto_map", None) or {}
        return self.trust_remote_code and AutoModelForCausalLM.__name__ in own

    @property
    def _is_multimodal(self) -> bool:
        """Whether the language model is a part of what the config describes."""
        whole = self._whole_config
        return whole.get_text_config(decoder=True) is not whole and not self._runs_own_code
