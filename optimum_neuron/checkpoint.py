# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from (Hub, folder, GGUF file) and how it becomes a transformers model with our attention."""

from __future__ import annotations

import fnmatch
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .graphs.attention import ATTENTION_NAME


# What an artifact takes over verbatim: configuration, tokenizer, chat templates; never weights.
VERBATIM = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
NOT_VERBATIM = ("*.index.json", "neuron_config.json")
WEIGHT_FILES = ("*.safetensors", "*.index.json")
CODE_FILES = ("*.py",)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the local disk.

    Attributes:
        folder: holds the checkpoint's files.
        gguf_file: name of the GGUF file in `folder`, if the checkpoint is one.
        source: what the user named, kept for the record.
    """

    folder: Path
    gguf_file: str | None
    source: str
    trust_remote_code: bool

    def load_config(self) -> PreTrainedConfig:
        """Raises ValueError where the checkpoint is not one that transformers knows as a decoder."""
        try:
            config = AutoConfig.from_pretrained(self.folder, **self._options())
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self.source}: {_first_line(error)}") from error
        except OSError as error:
            raise FileNotFoundError(f"{self.source}: {_first_line(error)}") from error
        if config.is_encoder_decoder:
            raise ValueError(
                f"{self.source} is an encoder-decoder ({config.model_type}); only decoders can be exported"
            )
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None and self.gguf_file is None:
            method = (
                quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
            )
            raise ValueError(f"{self.source} is quantized ({method}); export an unquantized or a GGUF checkpoint")
        return config

    def check_length(self, model_config: PreTrainedConfig, sequence_length: int) -> None:
        """Raises ValueError where a sequence is longer than the model's positions."""
        text_config = model_config.get_text_config(decoder=True)
        longest = getattr(text_config, "max_position_embeddings", None)
        if longest is not None and sequence_length > longest:
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

    def load_model(self, dtype: str) -> PreTrainedModel:
        """The model in `dtype` ("auto": the checkpoint's own), its attention replaced by the cached one."""
        options = self._options() | {
            "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
            "attn_implementation": ATTENTION_NAME,
        }
        if self.gguf_file is not None:
            if dtype == "auto":
                options["dtype"] = torch.float32
            # transformers keeps GGUF weights packed from the version that has this class on; graphs need them plain.
            if hasattr(transformers, "GgufConfig"):
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        try:
            model = AutoModelForCausalLM.from_pretrained(self.folder, **options)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self.source}: {_first_line(error)}") from error
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        return model.eval().requires_grad_(False)

    def write_verbatim(self, model: PreTrainedModel, folder: Path) -> None:
        """Puts config, generation config and tokenizer into `folder`: copied, or for GGUF written by transformers."""
        if self.gguf_file is not None:
            model.config.architectures = [type(model).__name__]  # GGUF has no word for it, and servers read it
            model.config.save_pretrained(folder)
            GenerationConfig.from_model_config(model.config).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.folder, gguf_file=self.gguf_file).save_pretrained(folder)
            return
        patterns = VERBATIM + (CODE_FILES if self.trust_remote_code else ())
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and _matches(name, patterns) and not _matches(name, NOT_VERBATIM):
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def find_checkpoint(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool, **hub: Any
) -> Checkpoint:
    """Resolves a Hub id, a folder or a .gguf file; a Hub repository is downloaded into the usual cache.

    Args:
        hub: `cache_dir`, `force_download` and `local_files_only` of the Hub's download functions.

    Raises:
        FileNotFoundError: nothing of that name exists, here or on the Hub.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return Checkpoint(path.parent, path.name, str(model), trust_remote_code)
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file of another kind; name a checkpoint folder, a .gguf file or a Hub id"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no config.json; name a checkpoint folder, a .gguf file or a Hub id")
        return Checkpoint(path, None, str(model), trust_remote_code)
    patterns = [*VERBATIM, *WEIGHT_FILES, *(CODE_FILES if trust_remote_code else ())]
    folder = download(str(model), patterns, revision=revision, token=token, **hub)
    return Checkpoint(folder, None, str(model), trust_remote_code)


def find_config(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool
) -> Checkpoint:
    """As `find_checkpoint`, but of a Hub repository no weights are downloaded: only the config can be loaded.

    Raises:
        FileNotFoundError: nothing of that name exists, here or on the Hub.
    """
    path = Path(model).expanduser()
    if path.exists() or path.suffix == ".gguf":
        return find_checkpoint(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    patterns = ["config.json", *(CODE_FILES if trust_remote_code else ())]
    return Checkpoint(
        download(str(model), patterns, revision=revision, token=token), None, str(model), trust_remote_code
    )


def download(repo_id: str, patterns: list[str], *, revision: str | None, token: str | bool | None, **hub: Any) -> Path:
    """Downloads a Hub repository's files that match `patterns`.

    Raises:
        FileNotFoundError: the name is neither a local path nor a reachable repository.
    """
    try:
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=patterns, **hub))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise FileNotFoundError(
            f"{repo_id} is neither a local path nor a Hub repository that can be read; check the name, or pass token"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise FileNotFoundError(
            f"{repo_id} is no local path, is not in the Hub cache, and the Hub cannot be reached; check the name or go online"
        ) from error


def empty_model(folder: Path, dtype: str, *, trust_remote_code: bool) -> nn.Module:
    """The model of a folder's config.json without weights, to be filled by `assign`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
        )
    return model.eval().requires_grad_(False)


def assign(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Binds tensors, named as in `weights.named_tensors`, to a model's parameters and buffers without copying.

    Names that share a tensor share a parameter: torch.export then gives it one input.

    Raises:
        ValueError: the model has a parameter or buffer that `tensors` lacks.
    """
    parameters: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for members in (module._parameters, module._buffers):
            for name, member in members.items():
                full = ".".join(part for part in ("model", prefix, name) if part)
                if member is None:
                    continue
                if full not in tensors:
                    raise ValueError(f"the artifact's weights lack {full}; export the model again")
                tensor = tensors[full]
                if isinstance(member, nn.Parameter):
                    members[name] = parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
                else:
                    members[name] = tensor


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
