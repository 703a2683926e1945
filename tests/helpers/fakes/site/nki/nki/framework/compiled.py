# SPDX-License-Identifier: Apache-2.0
"""Fake of NKI's compiler: binds arguments, has the kernel say what it makes, and writes a file where the call's configuration says.

FAKE_NKI_FOLDER names where files go.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nki.language.tensor import NkiTensor


class ParserFrontend:
    def __init__(self, enable_backend_opt: bool) -> None:
        self.enable_backend_opt = enable_backend_opt


@dataclass
class KernelConfig:
    backend_config_b64: bytes
    output_specs: list[NkiTensor]
    operand_output_aliases: dict[int, int] = field(default_factory=dict)


@dataclass
class Compiled:
    config: KernelConfig

    def build_config(self) -> KernelConfig:
        return self.config


@dataclass
class CompileKernel:
    func: Callable[..., Any]
    lnc: int
    target: str
    _frontend_cls: type = ParserFrontend
    _enable_backend_opt: bool = True

    def _compile_opts(self) -> dict[str, Any]:
        return {"target": self.target, "lnc": self.lnc}

    def _cached_compile_to_bir(
        self, *, frontend: Any, inputs: dict[str, Any], compile_opts: dict[str, Any]
    ) -> Compiled:
        bound = inspect.signature(self.func).bind(**inputs)
        made = self.func(*bound.args, **bound.kwargs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        tensors = {name: each for name, each in inputs.items() if isinstance(each, NkiTensor)}
        assert all(each.buffer == "shared_hbm" and each.name == name for name, each in tensors.items())
        path = Path(os.environ["FAKE_NKI_FOLDER"]) / f"{self.func.__name__}.json"
        described = {name: [each.dtype, list(each.shape)] for name, each in tensors.items()}
        path.write_text(json.dumps(described | compile_opts), encoding="utf-8")
        config = {
            "func_name": self.func.__name__,
            "kernel_format": "bir",
            "klir_binary": {
                "binary": str(path),
                "input_names": list(tensors),
                "output_names": [each.name for each in outputs],
            },
            "grid": self.lnc,
        }
        encoded = base64.b64encode(json.dumps(config).encode())
        return Compiled(KernelConfig(encoded, outputs))
