# SPDX-License-Identifier: Apache-2.0
"""Fake neuronx-cc: takes the documented options, reads the HLO, and writes a NEFF that holds it.

FAKE_NCC_LOG names a file that gets a line of JSON per call. FAKE_NCC_VERSION is the version. FAKE_NCC_FAULTS says by graph, or for
"*", how a compilation fails: an NCC code, hang, no-output, short, die, memory, disk. A code with " late" behind it waits until
two compilations hang.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


sys.path += os.environ["FAKE_NEURON_SITE"].split(os.pathsep)
from fake_neuron import neff


TARGETS = ("inf2", "trn1", "trn1n", "trn2", "trn3")
# Option to its values; None takes no value, "*" any.
OPTIONS = {
    "--framework": ("XLA",), "--target": TARGETS, "--output": "*", "--logfile": "*", "--verbose": "*",
    "--model-type": ("generic", "transformer", "unet-inference"), "--auto-cast": ("none", "matmult", "all"),
    "--auto-cast-type": ("bf16", "fp16", "tf32", "fp8_e4m3"), "--optlevel": ("1", "2", "3"), "-O": ("1", "2", "3"),
    "--logical-nc-config": ("1", "2"), "--lnc": ("1", "2"), "-lnc": ("1", "2"),
    "--native-int64": ("default", "enabled", "disabled"), "--implicit-integer-downcast": "*",
    "--distribution-strategy": ("llm-training",), "--enable-saturate-infinity": None,
    "--enable-mixed-precision-accumulation": None, "--disable-mixed-precision-accumulation": None,
    "--enable-fast-context-switch": None, "--enable-fast-loading-neuron-binaries": None,
    "--internal-hlo2tensorizer-options": "*", "--tensorizer-options": "*", "--internal-enable-dge-levels": "*",
}  # fmt: skip
FP8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
NESTED_OPTIONS = {
    "--tensorizer-options": (
        "--enable-ccop-compute-overlap",
        "--cc-pipeline-tiling-factor",
        "--vectorize-strided-dma",
    ),
    "--internal-hlo2tensorizer-options": (FP8, "--modular-flow-mac-threshold", "--verify-hlo"),
}
INT64_SINCE = (2, 27, 5334)
# As the documentation lists them for older releases; in the last line, what notes of later ones and real graphs add.
OPERATORS = """\
Abs Add AllGather AllReduce Atan2 BatchNormGrad BatchNormInference BatchNormTraining BitcastConvertType Broadcast
BroadcastInDim Ceil Clamp Compare Concatenate Constant ConvertElementType Cos CustomCall Div Dot DotGeneral
DynamicUpdateSlice Eq Exp Floor Gather Ge GetTupleElement Gt Iota Le Log LogicalAnd LogicalNot Lt Max Min Mul Ne Neg Pad Pow
Reduce Reshape Rev RevSeq RngBitGenerator RngUniform Rsqrt Scatter Select SelectAndScatter ShiftRightLogical Sign Sin Slice
Sqrt Sub Tanh Transpose Tuple
DynamicSlice Expm1 Log1p Logistic LogicalOr ReduceScatter Tan TopK
"""
VERSION = os.environ.get("FAKE_NCC_VERSION", "2.27.5334.0+f702b353")


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["--version"], ["-V"]):
        sys.stdout.write(f"NeuronX Compiler version {VERSION}\n\nPython version 3.11.7\nHWM version {VERSION}\n")
        return 0
    if arguments == ["list-operators", "--framework", "XLA"]:
        sys.stdout.write(OPERATORS.replace(" ", "\n"))
        return 0
    assert arguments[0] == "compile"
    file, options = read_options(arguments[1:])
    record(arguments, file)
    return compile_file(Path(file), options)


def read_options(arguments: list[str]) -> tuple[str, dict[str, str | None]]:
    parser = argparse.ArgumentParser("neuronx-cc", allow_abbrev=False)
    parser.add_argument("file")
    for name, values in OPTIONS.items():
        if values is None:
            parser.add_argument(name, dest=name, action="store_true", default=argparse.SUPPRESS)
        else:
            choices = None if values == "*" else values
            parser.add_argument(name, dest=name, choices=choices, default=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    named = [each.partition("=")[0] for each in arguments if each.startswith("-")]
    if len(set(named)) < len(named):
        parser.error("an option is given twice")
    try:
        check_options(options)
    except ValueError as error:
        parser.error(str(error))
    return options.pop("file"), options


def check_options(options: dict[str, str | None]) -> None:
    for name in ("--framework", "--target"):
        if name not in options:
            raise ValueError(f"the following arguments are required: {name}")
    for name, known in NESTED_OPTIONS.items():
        for option in (options.get(name) or "").split():
            if option.partition("=")[0] not in known:
                raise ValueError(f"{name}: unrecognized arguments: {option}")
    int64 = [name for name in ("--native-int64", "--implicit-integer-downcast") if name in options]
    numbers = tuple(int(part) for part in VERSION.split("+")[0].split("."))
    if int64 and numbers < INT64_SINCE:
        raise ValueError(f"unrecognized arguments: {int64[0]}")
    if int64 and options["--target"] not in ("trn2", "trn3"):
        raise ValueError(f"{int64[0]} is only available on trn2 and later")


def compile_file(path: Path, options: dict[str, str | None]) -> int:
    log = Path(options.get("--logfile") or "log-neuron-cc.txt")
    log.write_text(f"compiling {path}\n")
    (Path.cwd() / "side-file.txt").write_text("the compiler leaves files where it runs")
    (Path(os.environ["TMPDIR"]) / "intermediate").write_text("and in the folder for temporary files")
    lnc = next((options[name] for name in ("--lnc", "-lnc", "--logical-nc-config") if name in options), None)
    if options["--target"] in ("inf2", "trn1", "trn1n") and lnc not in (None, "1"):
        return fail(log, "NCC_EARG001", "Unsupported Logical Neuron Core configuration")
    faults = json.loads(os.environ.get("FAKE_NCC_FAULTS", "{}"))
    fault = faults.get(path.stem, faults.get("*"))
    output = Path(options.get("--output") or "file.neff")
    if fault is not None:
        status = break_down(fault, log, output)
        if status is not None:
            return status
    data = path.read_bytes()
    described = describe_module(data)
    if any(dtype == "float8_e4m3fn" for _, _, _, dtype, *_ in described["instructions"]):
        converted = FP8 in (options.get("--internal-hlo2tensorizer-options") or "").split()
        if converted == (options["--target"] == "trn3"):
            return fail(log, "NCC_EOCP001" if converted else "NCC_EVRF051", "Data type F8E4M3FN is not supported.")
    output.write_bytes(neff.pack(data, described, str(options["--target"]), int(lnc or 1)))
    sys.stdout.write("Compiler status PASS" + "\n")
    return 0


def describe_module(data: bytes) -> dict[str, Any]:
    """What a device has to know of an HLO module."""
    import hlo  # of optimum_neuron.targets.neuron.graphs

    module = hlo.parse(data)
    entry = hlo.entry(module)
    root = hlo.find_root(entry)
    aliases = module.input_output_alias.entries
    if any(each.kind != hlo.MUST_ALIAS for each in aliases):
        raise ValueError("an alias is not MUST_ALIAS")

    def described(shape: Any) -> tuple[list[int], str]:
        return list(shape.dimensions), hlo.dtype_name(shape)

    def attribute(instruction: Any, name: str) -> str:
        return next(each.value for each in instruction.frontend_attributes.map if each.key == name)

    outputs = zip(attribute(root, "neff_output_names").split(","), root.shape.tuple_shapes, strict=True)
    return {
        "inputs": [
            (each.name, attribute(each, "neff_input_names"), *described(each.shape)) for each in hlo.parameters(module)
        ],
        "outputs": [(f"result {index}", name, *described(each)) for index, (name, each) in enumerate(outputs)],
        "aliases": [(each.output_shape_index[0], each.parameter_number) for each in aliases],
        "instructions": [
            (each.id, each.opcode, *described(each.shape), list(each.operand_ids), each.parameter_number)
            for each in entry.instructions
        ],
    }


def break_down(fault: str, log: Path, output: Path) -> int | None:
    hanging = Path(os.environ["FAKE_NCC_LOG"]).with_suffix(".pids")
    if fault == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with hanging.open("a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)
    code, _, late = fault.partition(" ")
    while late and not (hanging.is_file() and len(hanging.read_text().splitlines()) > 1):
        time.sleep(0.01)
    if fault == "die":
        os.kill(os.getpid(), signal.SIGABRT)
    if fault == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "disk":
        sys.stderr.write("OSError: [Errno 28] No space left on device" + "\n")
        return 1
    if fault == "no-output":
        return 0
    if fault == "short":
        output.write_bytes(b"NEFF")
        return 0
    return fail(log, f"NCC_{code}", "as the test wants it")


def fail(log: Path, code: str, message: str) -> int:
    with log.open("a") as file:
        file.write(f"ERROR 4711 [neuronx-cc]: [{code}] {message}\n")
    sys.stderr.write("Compiler status ERROR" + "\n")
    return 70


def record(arguments: list[str], file: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("NEURON", "TMPDIR"))}
    line = {"argv": arguments, "cwd": os.getcwd(), "environment": kept, "graph": Path(file).stem}
    with open(os.environ["FAKE_NCC_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


sys.exit(main(sys.argv[1:]))
