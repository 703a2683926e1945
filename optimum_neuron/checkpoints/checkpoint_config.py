# SPDX-License-Identifier: Apache-2.0
"""The config of a checkpoint, the quantization that it names, and its language model without weights."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..config import LARGEST_SIZE
from ..errors import first_line
from .files import read_object
from .formats import quantization_of
from .gguf.config import read_config
from .gguf.header import TOKENS_KEY, GgufHeader, read_header
from .language_model import find_text_config, find_text_part, multimodal_class
from .mapped import NAMED
from .tokenizer import begin_as_in_gguf, has_tokenizer, load_tokenizer
from .unread import unread_keys


logger = logging.getLogger(__name__)

# Several times the deepest decoders and the most experts: transformers makes lists and modules of as many.
_MOST = {
    "block_count": 1000, "num_hidden_layers": 1000, "num_layers": 1000, "n_layer": 1000, "n_layers": 1000,
    "num_experts": 10_000, "num_local_experts": 10_000, "n_routed_experts": 10_000, "expert_count": 10_000,
}  # fmt: skip
# At least one of each, by the names of transformers' configs and of GGUF.
_NEEDED = (
    "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "num_key_value_heads", "hidden_size", "n_embd",
    "d_model", "head_dim", "vocab_size", "block_count", "embedding_length", "attention.head_count", "attention.head_count_kv",
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint's files, apart from the numbers of its weights; `source` is the user's name of it.

    `codes` is `formats.KEEP` or `DEQUANTIZE`. With None codes are kept, except blocks of a GGUF file that no codes and scales stand for: these
    become plain weights with a notice.
    """

    folder: Path
    gguf_file: str | None
    source: str
    trust_remote_code: bool
    codes: str | None = None

    def load_config(self) -> PreTrainedConfig:
        """Return the language model's config; raise FileNotFoundError where it is unreadable, ValueError where it is no decoder's that is read."""
        config = copy.deepcopy(self._whole_config)
        text_config = config if self._runs_own_code else find_text_config(config, self.source)
        if text_config.dtype is None:
            text_config.dtype = config.dtype
        if hasattr(text_config, "quantization_config"):
            del text_config.quantization_config  # the weights will be plain
        return text_config

    def warn_of_unread_keys(self) -> None:
        """Log one line with the keys that say how a model computes, and that the config's class does not read."""
        if self.gguf_file is not None or self._runs_own_code:
            return
        whole, document = self._whole_config, self._document
        config = whole.get_text_config(decoder=True)
        if config is not whole:
            document = next((part for name, part in document.items() if getattr(whole, name, None) is config), {})
        unread = unread_keys(document, config)
        if unread:
            said = ", ".join(f"{json.dumps(name)[1:-1]:.60}={json.dumps(value):.60}" for name, value in unread.items())
            logger.warning(
                f"{self.source}: its config.json says {said}, which {type(config).__name__} does not read, though other models compute by "
                f"it: the export computes as transformers does, without it"
            )

    def longest_text(self, model_config: PreTrainedConfig) -> int | None:
        """Return the tokens that a model has positions for; None where its config names no limit."""
        longest = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
        return longest if longest is not None and longest > 0 else None  # -1 stands for no limit

    def check_length(self, model_config: PreTrainedConfig, sequence_length: int) -> None:
        """Raise ValueError where a sequence is longer than the model's positions."""
        longest = self.longest_text(model_config)
        if longest is not None and longest < sequence_length:
            raise ValueError(
                f"sequence_length={sequence_length} is longer than the model's max_position_embeddings={longest}; lower --sequence-length"
            )

    def resolve_dtype(self, model_config: PreTrainedConfig, dtype: str) -> str | None:
        """Return torch's name of the type of the weights: as asked, or for "auto" the config's; None where it names none."""
        if dtype != "auto":
            return dtype
        if self.gguf_file is not None or model_config.dtype is None:
            return None
        return str(model_config.dtype).removeprefix("torch.")

    @property
    def is_plain(self) -> bool:
        """True if the files hold the weights of the exported model as plain numbers, and no others."""
        return self.gguf_file is None and self._method is None and not self._is_multimodal

    def identity(self) -> dict[str, Any]:
        """Return facts that change with the content of the checkpoint's files, and with the export of them."""
        files = [self.folder / self.gguf_file] if self.gguf_file is not None else sorted(self.folder.rglob("*"))
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        stats = {str(path): path.stat() for path in files if path.is_file()}
        facts = {path: [getattr(each, name) for name in names] for path, each in stats.items()}
        return {"codes": self.codes, "trust_remote_code": self.trust_remote_code, "files": facts}

    @cached_property
    def is_quantized(self) -> bool:
        """True if the files have codes in the place of weights."""
        return self.gguf.has_codes if self.gguf is not None else self._method is not None

    @cached_property
    def empty_model(self) -> PreTrainedModel:
        """The language model on the meta device."""
        own = copy.deepcopy(self._whole_config) if self._is_multimodal else self.load_config()
        auto = self._auto_class
        try:
            with torch.device("meta"):
                model = auto.from_config(own, attn_implementation="eager", trust_remote_code=self.trust_remote_code)
        except Exception as error:  # whatever a model's code comes to by wrong numbers
            raise ValueError(
                f"{self.source}: no {own.model_type} model can be built by its config ({first_line(error)}); correct it"
            ) from error
        return find_text_part(model, self.source) if self._is_multimodal else model

    @property
    def _auto_class(self) -> Any:
        return multimodal_class(self._whole_config) if self._is_multimodal else AutoModelForCausalLM

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, None where it has none; raises ValueError where its files cannot be read."""
        if self.gguf is None:
            if not has_tokenizer(self.folder):
                return None
            return load_tokenizer(self.folder, self.source, trust_remote_code=self.trust_remote_code)
        if TOKENS_KEY not in self.gguf.values:
            return None
        tokenizer = load_tokenizer(self.folder, self.source, trust_remote_code=False, gguf_file=self.gguf_file)
        begin_as_in_gguf(tokenizer, self.gguf.values)
        return tokenizer

    @cached_property
    def gguf(self) -> GgufHeader | None:
        return None if self.gguf_file is None else read_header(self.folder / self.gguf_file)

    @cached_property
    def _read_config(self) -> tuple[PreTrainedConfig, frozenset[str]]:
        assert self.gguf is not None
        return read_config(self.gguf, self.source)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return read_object(self.folder / "config.json")

    @property
    def _method(self) -> str | None:
        """The quantization that its config.json names."""
        return None if self.gguf_file else quantization_of(self._document, self.source).get("quant_method")

    @cached_property
    def _whole_config(self) -> PreTrainedConfig:
        """The config as transformers reads it, once; not to be changed."""
        if self.gguf is not None:
            _check_sizes(self.gguf.sizes(), self.source)
            return self._read_config[0]
        _check_sizes(self._document, str(self.folder / "config.json"))
        quantization_of(self._document, self.source)
        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except OSError as error:
            raise FileNotFoundError(f"{self.source}: {first_line(error)}") from error
        except Exception as error:  # a class's own code and checks may raise any error
            if not self.trust_remote_code and "auto_map" in self._document:
                raise ValueError(
                    f"{self.source} brings its own modeling code; read it, then pass --trust-remote-code (trust_remote_code=True) to run it"
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
        """True if the language model is only a part of the config's model."""
        whole = self._whole_config
        return whole.get_text_config(decoder=True) is not whole and not self._runs_own_code


def _check_sizes(document: Mapping[str, Any], where: str) -> None:
    """Raise ValueError where a document or one inside of it names a size that no model has, or an unknown type of weights."""
    for name, value in document.items():
        if isinstance(value, Mapping) and name != "quantization_config":  # its types are those of codes
            _check_sizes(value, where)
        if name in ("dtype", "torch_dtype") and value is not None and not (isinstance(value, str) and value in NAMED):
            raise ValueError(f"{where} names {name}={value!r:.60}, which is no type of weights; write 'bfloat16'")
        if isinstance(value, bool) or not isinstance(value, int) or name not in (*_MOST, *_NEEDED):
            continue
        if name in _NEEDED and value < 1:
            raise ValueError(f"{where} names {name}={value}, and a model has at least 1; correct it")
        if value > _MOST.get(name, LARGEST_SIZE):
            raise ValueError(
                f"{where} names {name}={value}, and no model has more than {_MOST.get(name, LARGEST_SIZE)}; correct it, or download it again"
            )
