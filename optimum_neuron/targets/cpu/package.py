# SPDX-License-Identifier: Apache-2.0
"""The package of a compiled graph: its code, and what it was compiled for, as the code checks no size of what it is given."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader

from ...artifacts.schema import (
    TEXT,
    anything,
    first_difference,
    listed,
    named,
    optional,
    parse_object,
    record,
    shown,
    whole,
)
from ...checkpoints.digest import file_sha256
from ...config import NeuronConfig
from ...graphs.spec import GraphSpec, ModelSpec


# AOTInductor keeps a text per name in the package; ours is JSON.
METADATA_KEY = "optimum_neuron"
_METADATA_SUFFIX = "_metadata.json"
_DESCRIPTION = record(
    {
        "graph": record(dict.fromkeys((field.name for field in fields(GraphSpec)), anything), closed=True),
        "model": record(dict.fromkeys((field.name for field in fields(ModelSpec)), anything), closed=True),
        "dtype": TEXT,
        "kernels": optional(record({"namespace": TEXT, "sha256": TEXT}, closed=True)),
        "constants": named(record({"dtype": TEXT, "shape": listed(whole(0))}, closed=True)),
    },
    closed=True,
)


@dataclass(frozen=True)
class Facts:
    """What graphs depend on, beside their own spec and constants.

    Attributes:
        namespace: of the operators of the own kernels; None without them.
        library: digest of the file that has them.
    """

    model: ModelSpec
    dtype: str
    namespace: str | None
    library: str | None

    @classmethod
    def of(cls, config: NeuronConfig, model: ModelSpec, namespace: str | None, library: Path | None) -> Facts:
        return cls(model, config.dtype, namespace, None if library is None else file_sha256(library))


def open_package(path: Path) -> AOTIModelPackageLoader:
    """Loads the code of a package, which has no weights yet.

    Raises:
        RuntimeError: it is damaged, or does not fit this machine.
    """
    # The loader that torch's load_package wraps: the wrapper looks for a C++ compiler, and warns where there is none.
    return AOTIModelPackageLoader(str(path), "model", False, 1, -1)


def describe(spec: GraphSpec, facts: Facts, constants: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata of a package.

    Args:
        constants: all tensors that are bound at load, by name.
    """
    own = {name: {"dtype": _dtype(value), "shape": list(value.shape)} for name, value in constants.items()}
    return {METADATA_KEY: json.dumps({**_expected(spec, facts), "constants": own})}


def read_description(path: Path) -> dict[str, Any] | None:
    """What a package says that it was compiled for; None where it does not, or not as this version does.

    Raises:
        ValueError: it is no package, or a damaged one.
    """
    try:
        with zipfile.ZipFile(path) as package:
            members, size = package.infolist(), path.stat().st_size
            if any(each.file_size > size for each in members):
                raise ValueError("its members are larger than itself")
            damaged = package.testzip()
            if damaged is not None:
                raise ValueError(f"its member {shown(damaged)} is damaged")
            metadata = [
                parse_object(package.read(each)) for each in members if each.filename.endswith(_METADATA_SUFFIX)
            ]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, struct.error) as error:
        raise ValueError(f"it is no package: {error}") from error
    texts = [each.get(METADATA_KEY) for each in metadata]
    if not texts or any(text != texts[0] for text in texts) or not isinstance(texts[0], str):
        return None
    description = parse_object(texts[0].encode())
    try:
        _DESCRIPTION("its metadata", description)
    except ValueError:
        return None
    return description


def check_description(description: Mapping[str, Any], spec: GraphSpec, facts: Facts) -> None:
    """Raises ValueError where a package was compiled for another graph, model, type or kernel library."""
    expected = _expected(spec, facts)
    for found, wanted in (
        (description["graph"], expected["graph"]),
        (description["model"], expected["model"]),
        (description, expected),
    ):
        difference = first_difference(found, wanted)
        if difference is not None:
            field, compiled, asked = difference
            raise ValueError(f"it was compiled for {field}={shown(compiled)}, and the artifact has {shown(asked)}")


def check_constants(description: Mapping[str, Any], names: list[str], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where a package takes a tensor that is missing, or has another shape or type."""
    known = description["constants"]
    for name in names:
        if name not in known:
            raise ValueError(f"it takes {name}, of which its metadata say nothing")
        if name not in tensors:
            raise ValueError(f"it needs {name}, which the artifact lacks")
        found = {"dtype": _dtype(tensors[name]), "shape": list(tensors[name].shape)}
        if found != known[name]:
            raise ValueError(
                f"it was compiled for {name} as {known[name]['dtype']} {known[name]['shape']}, and the artifact has "
                f"{found['dtype']} {found['shape']}"
            )


def _expected(spec: GraphSpec, facts: Facts) -> dict[str, Any]:
    return {
        "graph": asdict(spec),
        "model": {"convolutions": []} | facts.model.to_dict(),
        "dtype": facts.dtype,
        "kernels": None if facts.namespace is None else {"namespace": facts.namespace, "sha256": facts.library},
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
