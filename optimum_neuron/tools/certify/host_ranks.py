# SPDX-License-Identifier: Apache-2.0
"""Lowered modules, executed by XLA on this machine's CPU: all ranks at once, each on a device of XLA's, with collectives.

XLA's CPU client has as many devices as CPU_NUM_DEVICES says when it starts, so several ranks need a process of their own. In bfloat16
a wrong window edge may cost less than rounding does: a module is widened to float32, too, in which all but the types stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...kernels.host.processes import TiedProcess
from ...step.spec import PROMPT_LOGITS
from ...targets.neuron.graphs import hlo
from ...targets.neuron.graphs.io import CHOSEN, GraphIO


_TIMEOUT = 3600.0  # seconds
_ROOT = Path(__file__).parents[3]
_NARROW = {"bfloat16": "bf16s", "float16": "f16s"}
_FLOAT32 = hlo.ELEMENT_TYPES["float32"]


class LoweredModule(NamedTuple):
    """A lowered module as it is executed."""

    hlo: bytes
    io: GraphIO


@dataclass(frozen=True)
class GraphRun:
    """One run of a module: its inputs, and states that are written before it; the same on all ranks."""

    graph: str
    inputs: Mapping[str, Tensor]
    states: Mapping[str, Tensor] = field(default_factory=dict)


# By rank: the outputs of each run by name, with the slots' tokens where it updates them, and last the states at the end.
RankResults = list[list[dict[str, Tensor]]]
# A rank's weights and states by name, in the types that modules take; made one by one, as a large model's are not all needed at once.
RankTensors = Iterable[tuple[str, Tensor]]


def execute_ranks(
    modules: Mapping[str, LoweredModule], tensors: Sequence[RankTensors], runs: Sequence[GraphRun]
) -> RankResults:
    """Run modules one after the other; raise RuntimeError where XLA refuses one, or a rank waits for ever."""
    # It brings transformers, which a process of ranks does without.
    from ...targets.neuron.lowering.kernel_calls import by_reference

    modules = {name: each._replace(hlo=by_reference(each.hlo)) for name, each in modules.items()}
    if len(tensors) == 1:
        return RankGroup(modules, tensors).run_all(runs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_job(folder, modules, tensors, runs)
        _run_child(folder, len(tensors))
        found: RankResults = [[{} for _ in range(len(runs) + 1)] for _ in tensors]
        for rank, results in enumerate(found):
            for key, tensor in load_file(folder / f"found{rank}.safetensors").items():
                number, name = key.split(":", 1)
                results[int(number)][name] = tensor
        return found


def _write_job(
    folder: Path, modules: Mapping[str, LoweredModule], tensors: Sequence[RankTensors], runs: Sequence[GraphRun]
) -> None:
    for name, module in modules.items():
        (folder / f"{name}.hlo").write_bytes(module.hlo)
    document = {
        "modules": {name: asdict(module.io) for name, module in modules.items()},
        "runs": [{"graph": run.graph, "inputs": list(run.inputs), "states": list(run.states)} for run in runs],
        "ranks": len(tensors),
    }
    (folder / "job.json").write_text(json.dumps(document), encoding="utf-8")
    inputs = _number_tensors({**run.inputs, **run.states} for run in runs)
    # No two names share memory.
    save_file({name: each.clone() for name, each in inputs.items()}, folder / "inputs.safetensors")
    for rank, own in enumerate(tensors):
        save_file({name: each.clone() for name, each in own}, folder / f"rank{rank}.safetensors")


def _number_tensors(each_run: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{number}:{name}": each for number, run in enumerate(each_run) for name, each in run.items()}


def _run_child(folder: Path, ranks: int) -> None:
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(ranks)}
    # To compile takes longer than the few steps.
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", __name__, str(folder)]
    with (folder / "log").open("wb") as log:
        process = TiedProcess(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{ranks} ranks did not end within {_TIMEOUT:,.0f} s: one waits for a collective that another lacks"
            ) from None
        finally:
            process.end()
    if code:
        lines = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RuntimeError(f"XLA could not execute {ranks} ranks: {(lines or [f'exit status {code}'])[-1]}")


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            yield name, file.get_tensor(name)


class RankGroup:
    """Programs without calls of kernels, and per rank its weights and states on a device of XLA's."""

    def __init__(self, modules: Mapping[str, LoweredModule], tensors: Sequence[RankTensors]) -> None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        from torch_xla.core import xla_builder

        self._modules = modules
        self._programs: dict[str, Any] = {}
        self._aliases: dict[str, dict[int, str]] = {}
        for name, module in modules.items():
            self._programs[name] = xla_builder.computation_from_module_proto(name, number_channels(module.hlo))
            # By result, the parameter that gives it its memory, as on a device.
            self._aliases[name] = {
                entry.output_shape_index[0]: module.io.inputs[entry.parameter_number].name
                for entry in hlo.parse(module.hlo).input_output_alias.entries
            }
        needed = {each.name for module in modules.values() for each in module.io.inputs if each.role != "input"}
        self._devices = [f"xla:{rank}" for rank in range(len(tensors))]
        self._bound = [
            {name: tensor.to(device) for name, tensor in own if name in needed}
            for device, own in zip(self._devices, tensors, strict=True)
        ]

    def run_all(self, runs: Sequence[GraphRun]) -> RankResults:
        """Run modules one after the other; return all outputs and the states at the end."""
        found: RankResults = [list(outputs) for outputs in zip(*map(self.run_graph, runs), strict=True)]
        found = found or [[] for _ in self._devices]
        names = {name for module in self._modules.values() for name in module.io.names("state")}
        for results, bound in zip(found, self._bound, strict=True):
            results.append({name: tensor.cpu() for name, tensor in bound.items() if name in names})
        return found

    def run_graph(self, run: GraphRun) -> list[dict[str, Tensor]]:
        """Run a module on all ranks; return the outputs of each by name. The first rank compiles it for all before any waits for another:
        XLA ends a process if its ranks wait for long."""
        started = [self._start_rank(rank, run) for rank in range(len(self._devices))]
        return [self._take_outputs(rank, run, results) for rank, results in enumerate(started)]

    def _start_rank(self, rank: int, run: GraphRun) -> list[Tensor]:
        import torch_xla

        io, bound, device = self._modules[run.graph].io, self._bound[rank], self._devices[rank]
        bound |= {name: state.to(device) for name, state in run.states.items()}
        arguments = [
            run.inputs[each.name].to(device) if each.role == "input" else bound[each.name] for each in io.inputs
        ]
        program = self._programs[run.graph]
        results: list[Tensor] = torch_xla._XLAC._xla_user_computation(f"xla::{run.graph}", arguments, program)
        torch_xla._XLAC._xla_sync_multi(results, [device], False, True)
        return results

    def _take_outputs(self, rank: int, run: GraphRun, results: Sequence[Tensor]) -> dict[str, Tensor]:
        io, bound, aliases = self._modules[run.graph].io, self._bound[rank], self._aliases[run.graph]
        outputs = {}
        for index, (each, result) in enumerate(zip(io.outputs, results, strict=True)):
            if index in aliases:
                bound[aliases[index]] = result
            elif rank == 0 or each.name != PROMPT_LOGITS:  # which are large, and compared of the first rank alone
                outputs[each.name] = result.cpu()
        if CHOSEN in outputs or CHOSEN in aliases.values():
            outputs[CHOSEN] = bound[CHOSEN].cpu()  # the kept state, whatever the module returns
        return outputs


def number_channels(data: bytes) -> bytes:
    """Give each collective a channel: XLA else uses its own number of the module, which differs between ranks."""
    module = hlo.parse(data)
    collectives = [each for _, each in hlo.instructions(module) if each.opcode in hlo.COLLECTIVES]
    for channel, instruction in enumerate(collectives, start=1):
        instruction.channel_id = channel
    return hlo.serialize(module) if collectives else data


def widen_module(lowered: LoweredModule) -> LoweredModule:
    """Return a module with float32 for 16-bit numbers, and its description; raise ValueError where it reads their bits."""
    module = hlo.parse(lowered.hlo)
    for computation in module.computations:
        _widen_program(computation.program_shape)
        shapes = {each.id: each.shape for each in computation.instructions}
        narrow = {number for number, shape in shapes.items() if hlo.dtype_name(shape) in _NARROW}
        for instruction in computation.instructions:
            if instruction.opcode == "bitcast-convert" and instruction.operand_ids[0] in narrow:
                raise ValueError(
                    f"{instruction.name} looks at the bits of a 16-bit number; convert it to float32 first"
                )
            if instruction.HasField("literal"):
                literal, name = instruction.literal, hlo.dtype_name(instruction.literal.shape)
                if name in _NARROW:
                    data = bytearray(getattr(literal, _NARROW[name]))
                    literal.ClearField(_NARROW[name])
                    literal.f32s.extend(torch.frombuffer(data, dtype=getattr(torch, name)).float().tolist())
                _widen_shape(literal.shape)
            _widen_shape(instruction.shape)
    _widen_program(module.host_program_shape)
    wide = hlo.serialize(module)
    io = lowered.io
    inputs = tuple(replace(each, dtype="float32") if each.dtype in _NARROW else each for each in io.inputs)
    outputs = tuple(replace(each, dtype="float32") if each.dtype in _NARROW else each for each in io.outputs)
    digest = hashlib.sha256(wide).hexdigest()
    return LoweredModule(wide, replace(io, inputs=inputs, outputs=outputs, hlo_sha256=digest))


def _widen_program(program: Any) -> None:
    for shape in (*program.parameters, program.result):
        _widen_shape(shape)


def _widen_shape(shape: Any) -> None:
    if hlo.dtype_name(shape) in _NARROW:
        shape.element_type = _FLOAT32
    for inner in shape.tuple_shapes:
        _widen_shape(inner)


def main(folder: Path) -> None:
    """Run the job that `execute_ranks` left in a folder."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    modules = {
        name: LoweredModule((folder / f"{name}.hlo").read_bytes(), GraphIO.from_dict(io))
        for name, io in job["modules"].items()
    }
    given = load_file(folder / "inputs.safetensors")
    runs = []
    for number, run in enumerate(job["runs"]):
        inputs, states = ({name: given[f"{number}:{name}"] for name in run[part]} for part in ("inputs", "states"))
        runs.append(GraphRun(run["graph"], inputs, states))
    tensors = [_read_tensors(folder / f"rank{rank}.safetensors") for rank in range(job["ranks"])]
    for rank, results in enumerate(RankGroup(modules, tensors).run_all(runs)):
        flat = {name: each.contiguous() for name, each in _number_tensors(results).items()}
        save_file(flat, folder / f"found{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # XLA's threads of several devices do not always end
