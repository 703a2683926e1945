# SPDX-License-Identifier: Apache-2.0
"""A plan: a graph as steps of the own kernels, written to a file, checked, and bound to memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .host.machine import count_threads
from .run.bound_plan import BoundPlan
from .run.memory import TensorForm, dtype_name
from .steps.access import PlanError
from .steps.check import check_steps
from .steps.json_form import build_from_json, shorten, write_as_json
from .steps.steps import PlanData


FORMAT = 11
# A larger file is not read into memory.
_LARGEST_FILE = 64 << 20
_OWN_FIELDS = ("format", "tensors", "plan", "sha256")


class OldPlanError(ValueError):
    """A plan of another format, which has to be made again."""


@dataclass(frozen=True)
class TensorSize:
    """The type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of_tensor(cls, tensor: TensorForm) -> TensorSize:
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape))


class Plan(PlanData):
    """A graph's steps over buffers, with all that is done with them."""

    def save(self, path: Path, made_for: Mapping[str, Any], tensors: Mapping[str, TensorForm]) -> None:
        """Write the plan, the JSON values that `load` gives to its check, and the types and shapes of the tensors that it uses."""
        used = sorted({buffer.name for buffer in self.buffers if buffer.kind == "tensor"})
        sizes = {name: asdict(TensorSize.of_tensor(tensors[name])) for name in used}
        content = {"format": FORMAT, **made_for, "tensors": sizes, "plan": write_as_json(self)}
        path.write_text(_serialize(content | {"sha256": _digest(content)}), encoding="utf-8")

    @classmethod
    def load(
        cls, path: Path, tensors: Mapping[str, TensorForm], check_made_for: Callable[[Mapping[str, Any]], None]
    ) -> Plan:
        """Read a plan, which is still to be checked; `check_made_for` raises ValueError where it is for another graph.

        Raises:
            ValueError: the file holds no plan, was changed, or is for another graph or other tensors.
            OldPlanError: the plan has another format.
        """
        found = _read_object(path)
        if found.get("format") != FORMAT:
            raise OldPlanError(f"it has the format {shorten(found.get('format'))}, and this version reads {FORMAT}")
        if missing := [name for name in _OWN_FIELDS if name not in found]:
            raise ValueError(f"the plan lacks {', '.join(missing)}")
        if found["sha256"] != _digest(found):
            raise ValueError("it is not what was written: its digest is another")
        check_made_for({name: value for name, value in found.items() if name not in _OWN_FIELDS})
        try:
            sizes = build_from_json(dict[str, TensorSize], found["tensors"])
            for name, made in sizes.items():
                if name not in tensors:
                    raise ValueError(f"it needs {name}, which the artifact lacks")
                own = TensorSize.of_tensor(tensors[name])
                if own != made:
                    raise ValueError(
                        f"it was compiled for {name} as {made.dtype} {list(made.shape)}, and the artifact has {own.dtype} "
                        f"{list(own.shape)}"
                    )
            plan: Plan = build_from_json(cls, found["plan"])
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        for buffer in plan.buffers:
            if buffer.kind == "tensor" and buffer.name not in sizes:
                raise ValueError(f"it uses {shorten(buffer.name)}, of which it says nothing")
        return plan

    def check(self, tensors: Mapping[str, TensorForm]) -> None:
        """Check what each step reads and writes of weights, states and constants, before any runs, as `steps.check` says; raise PlanError."""
        check_steps(self, {name: dtype_name(each.dtype) for name, each in tensors.items()})

    def bind(
        self,
        tensors: Mapping[str, np.ndarray],
        inputs: Sequence[TensorForm],
        outputs: Sequence[TensorForm],
        arena: np.ndarray,
        *,
        library: ctypes.CDLL,
        short_scales: Collection[str] = (),
        threads: Callable[[], int] = count_threads,
    ) -> BoundPlan:
        """Bind the steps to memory.

        Args:
            tensors: weights, states and the plan's constants by name; they stay where they are.
            inputs, outputs: of the graph, in order.
            arena: bytes that all plans share, as they run one at a time (`run.memory.allocate_arena`).
            library: the kernels (`host.native_build.load_library`).
            short_scales: names of the tensors that hold short scales alone (`run.short_scales.find_short_scales`).
            threads: gives the number of threads of each run.

        Raises:
            PlanError: the plan does not fit its buffers, or has other outputs.
        """
        bound = BoundPlan(self, tensors, inputs, outputs, arena, library, short_scales, threads)
        if len(bound.outputs) != len(outputs):
            raise PlanError(f"it has {len(bound.outputs)} outputs, and its graph {len(outputs)}")
        return bound


def _read_object(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE:
            raise ValueError(f"it is no file of at most {_LARGEST_FILE:,} bytes")
        data = file.read(_LARGEST_FILE)
    try:
        found = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if isinstance(found, dict):
        return found
    raise ValueError(f"it is {shorten(found)}, not an object")


def _serialize(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def _digest(content: Mapping[str, Any]) -> str:
    """Return a digest of all other fields: it finds a change that nothing else contradicts."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(_serialize(rest).encode()).hexdigest()
