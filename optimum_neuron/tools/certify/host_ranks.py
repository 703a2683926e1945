# SPDX-License-Identifier: Apache-2.0
"""Executes lowered modules by XLA on this machine's CPU: all ranks at once, collectives included, a device of XLA's each.

XLA's CPU client has as many devices as CPU_NUM_DEVICES says when it starts, so several ranks need a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...step.spec import PROMPT_LOGITS
from ...targets.neuron.graph_io import CHOSEN, GraphIO
from ...targets.neuron.lowering import hlo
from ...targets.processes import TiedProcess


_TIMEOUT = 3600.0  # seconds
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ROOT = Path(__file__).parents[3]


class Module(NamedTuple):
    """A lowered module as it is executed."""

    hlo: bytes
    io: GraphIO


@dataclass(frozen=True)
class Given:
    """One run of a module: its inputs by name, the same for all ranks.

    Attributes:
        states: written before the run, on all ranks.
    """

    graph: str
    inputs: Mapping[str, Tensor]
    states: Mapping[str, Tensor] = field(default_factory=dict)


# By rank: the outputs of each run by name, with the slots' tokens where it updates them, and last what the states hold at the end.
Found = list[list[dict[str, Tensor]]]
# A rank's weights and states by name, in the types that modules take; made one by one, as a large model's are not all needed at once.
Tensors = Iterable[tuple[str, Tensor]]


def execute(modules: Mapping[str, Module], tensors: Sequence[Tensors], runs: Sequence[Given]) -> Found:
    """Runs modules one after the other.

    Args:
        tensors: by rank.

    Raises:
        RuntimeError: XLA refuses a module, or ranks wait for each other for ever.
    """
    # It brings transformers, which a process of ranks does without.
    from ...targets.neuron.lowering.kernel_calls import by_reference

    modules = {name: each._replace(hlo=by_reference(each.hlo)) for name, each in modules.items()}
    if len(tensors) == 1:
        return Ranks(modules, tensors).run_all(runs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, module in modules.items():
            (folder / f"{name}.hlo").write_bytes(module.hlo)
        document = {
            "modules": {name: module.io.to_dict() for name, module in modules.items()},
            "runs": [{"graph": run.graph, "inputs": list(run.inputs), "states": list(run.states)} for run in runs],
            "ranks": len(tensors),
        }
        (folder / "job.json").write_text(json.dumps(document), encoding="utf-8")
        inputs = {
            f"{number}:{name}": each
            for number, run in enumerate(runs)
            for name, each in {**run.inputs, **run.states}.items()
        }
        # No two names share memory.
        save_file({name: each.clone() for name, each in inputs.items()}, folder / "inputs.safetensors")
        for rank, own in enumerate(tensors):
            save_file({name: each.clone() for name, each in own}, folder / f"rank{rank}.safetensors")
        _run_child(folder, len(tensors))
        return [_read_results(folder / f"found{rank}.safetensors", len(runs)) for rank in range(len(tensors))]


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


def _read_results(path: Path, runs: int) -> list[dict[str, Tensor]]:
    results: list[dict[str, Tensor]] = [{} for _ in range(runs + 1)]
    for key, tensor in load_file(path).items():
        number, name = key.split(":", 1)
        results[int(number)][name] = tensor
    return results


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            yield name, file.get_tensor(name)


class Ranks:
    """Programs, and per rank its weights and states on a device of XLA's.

    Args:
        modules: without calls of kernels.
    """

    def __init__(self, modules: Mapping[str, Module], tensors: Sequence[Tensors]) -> None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        from torch_xla.core import xla_builder

        self._modules = modules
        self._programs = {
            name: xla_builder.computation_from_module_proto(name, with_channels(module.hlo))
            for name, module in modules.items()
        }
        self._aliases = {name: _aliases(module) for name, module in modules.items()}
        needed = {each.name for module in modules.values() for each in module.io.inputs if each.role != "input"}
        self._devices = [f"xla:{rank}" for rank in range(len(tensors))]
        self._bound = [
            {name: tensor.to(device) for name, tensor in own if name in needed}
            for device, own in zip(self._devices, tensors, strict=True)
        ]

    def run_all(self, runs: Sequence[Given]) -> Found:
        """Runs modules one after the other."""
        found: Found = [[] for _ in self._devices]
        for run in runs:
            for results, outputs in zip(found, self.run(run), strict=True):
                results.append(outputs)
        for results, bound in zip(found, self._bound, strict=True):
            names = {name for module in self._modules.values() for name in module.io.names("state")}
            results.append({name: tensor.cpu() for name, tensor in bound.items() if name in names})
        return found

    def run(self, run: Given) -> list[dict[str, Tensor]]:
        """One run on all ranks; the outputs of each by name.

        The first rank compiles the module for all before any waits for another: XLA ends a process whose ranks wait for long.
        """
        started = [self._start(rank, run) for rank in range(len(self._devices))]
        return [self._outputs(rank, run, results) for rank, results in enumerate(started)]

    def _start(self, rank: int, run: Given) -> list[Tensor]:
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

    def _outputs(self, rank: int, run: Given, results: Sequence[Tensor]) -> dict[str, Tensor]:
        io, bound = self._modules[run.graph].io, self._bound[rank]
        outputs = {}
        aliases = self._aliases[run.graph]
        for index, (each, result) in enumerate(zip(io.outputs, results, strict=True)):
            if index in aliases:
                bound[aliases[index]] = result
            elif rank == 0 or each.name != PROMPT_LOGITS:  # which nobody reads of others, and are large
                outputs[each.name] = result.cpu()
        if CHOSEN in outputs or CHOSEN in aliases.values():
            outputs[CHOSEN] = bound[CHOSEN].cpu()  # what is kept, whatever the module returns
        return outputs


def _aliases(module: Module) -> dict[int, str]:
    """By result, the parameter whose memory it is written to: by the module itself, which is what a device does."""
    entries = hlo.parse(module.hlo).input_output_alias.entries
    return {entry.output_shape_index[0]: module.io.inputs[entry.parameter_number].name for entry in entries}


def with_channels(data: bytes) -> bytes:
    """XLA tells collectives apart by channel, or else by its own number of the module, which differs between ranks."""
    module = hlo.parse(data)
    collectives = [each for _, each in hlo.instructions(module) if each.opcode in _COLLECTIVES]
    for channel, instruction in enumerate(collectives, start=1):
        instruction.channel_id = channel
    return hlo.serialize(module) if collectives else data


def main(folder: Path) -> None:
    """Runs what `execute` left in a folder."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    modules = {
        name: Module((folder / f"{name}.hlo").read_bytes(), GraphIO.from_dict(io))
        for name, io in job["modules"].items()
    }
    given = load_file(folder / "inputs.safetensors")
    runs = [
        Given(
            run["graph"], *({name: given[f"{number}:{name}"] for name in run[part]} for part in ("inputs", "states"))
        )
        for number, run in enumerate(job["runs"])
    ]
    tensors = [_read_tensors(folder / f"rank{rank}.safetensors") for rank in range(job["ranks"])]
    for rank, results in enumerate(Ranks(modules, tensors).run_all(runs)):
        flat = {f"{number}:{name}": each for number, outputs in enumerate(results) for name, each in outputs.items()}
        save_file({name: each.contiguous() for name, each in flat.items()}, folder / f"found{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # XLA's threads of several devices do not always end
