# SPDX-License-Identifier: Apache-2.0
"""ExportOptions: which checkpoint an export reads, and what becomes of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .graph_options import TASKS
from .option import REPEATED, Options, documented, option


_FOUND = ("revision", "token", "cache_dir", "force_download", "local_files_only")


@documented
@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of an export that are no sizes of its graphs; raise ValueError for another `task` than text-generation."""

    revision: str | None = option(
        None, "branch, tag or commit of the Hub repository (default: its main branch)", "checkpoint"
    )
    token: str | bool | None = option(
        None, "Hub token, for gated and private models (default: the one that hf stored)", "checkpoint"
    )
    cache_dir: str | Path | None = option(None, "folder of the Hub's cache, as in transformers")
    force_download: bool = option(False, "download files that the Hub's cache has already, as in transformers")
    local_files_only: bool = option(False, "ask the Hub for nothing, as in transformers")
    trust_remote_code: bool = option(False, "run Python code that the checkpoint brings", "checkpoint", is_switch=True)
    adapter: str | Path | Sequence[str | Path] | None = option(
        None,
        "folder or Hub id of a PEFT adapter, such as LoRA, to merge into the weights in float32; give the option again for another "
        "one (in Python: a list). `revision` does not apply to it",
        "checkpoint",
        metavar="ADAPTER",
        many=REPEATED,
    )
    dequantize: bool = option(
        False,
        "export a quantized checkpoint's weights as plain numbers, or, with `quantization`, round them again (default: keep its codes)",
        "checkpoint",
        is_switch=True,
    )
    quantization_calibration: str | Path | None = option(
        None,
        "with int4 `quantization`, a text in UTF-8 of some thousand tokens that the model reads once: weights with large inputs are then "
        "rounded most exactly; the artifact keeps the text's digest alone (default: weights are rounded by themselves)",
        "checkpoint",
        metavar="FILE",
        parse=Path,
    )
    task: str = option(TASKS[0], "what the model is for", "checkpoint", choices=TASKS)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r} is not supported; choose one of {', '.join(TASKS)}")

    @property
    def hub(self) -> dict[str, Any]:
        """The options that find files on the Hub, as keywords of `find_checkpoint` and `find_artifact`."""
        return {name: getattr(self, name) for name in _FOUND}

    def refuse_for_artifact(self, model: object) -> None:
        """Raise ValueError where an option changes what an export makes: `model` is an artifact already."""
        for name in ("adapter", "dequantize", "quantization_calibration"):
            value = getattr(self, name)
            if value not in (None, False):
                shown = str(value) if isinstance(value, Path) else value
                raise ValueError(
                    f"{name}={shown!r} is an option of an export, and {model} is an artifact; export its checkpoint with it"
                )
