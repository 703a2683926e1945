# SPDX-License-Identifier: Apache-2.0
"""Fake neuronx-cc: takes the documented options, reads the HLO, and writes a NEFF that holds it.

FAKE_NCC_LOG names a file that gets a line of JSON per call. FAKE_NCC_VERSION is the version. FAKE_NCC_FAULTS says by graph, or for
"*", how a compilation fails: an NCC code, hang, no-output, short, die, memory, disk. A code with " late" behind it waits until
two compilations hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


sys.path.insert(0, os.environ["FAKE_NEURON_SITE"])
from fake_neuron import neff, wire


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
    "--internal-hlo2tensorizer-options": "*", "--tensorizer-options": "*",
}  # fmt: skip
TENSORIZER_OPTIONS = ("--enable-ccop-compute-overlap", "--cc-pipeline-tiling-factor", "--vectorize-strided-dma")
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
    if arguments[:1] != ["compile"]:
        return refuse(f"argument command: invalid choice: {arguments[:1]}")
    try:
        files, options = read_options(arguments[1:])
    except ValueError as error:
        return refuse(str(error))
    if len(files) != 1:
        return refuse(f"one model file is needed, not {files}")
    record(arguments, files[0])
    return compile_file(Path(files[0]), options)


def read_options(arguments: list[str]) -> tuple[list[str], dict[str, str | None]]:
    files: list[str] = []
    options: dict[str, str | None] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            files.append(token)
            continue
        name, separator, value = token.partition("=")
        if name.startswith("-O") and name != "-O":
            name, separator, value = "-O", "=", name[2:]
        if name not in OPTIONS:
            raise ValueError(f"unrecognized arguments: {token}")
        if name in options:
            raise ValueError(f"{name} is given twice")
        allowed = OPTIONS[name]
        if allowed is None:
            if separator:
                raise ValueError(f"argument {name}: ignored explicit argument {value!r}")
            options[name] = None
            continue
        if not separator:
            if not rest:
                raise ValueError(f"argument {name}: expected one argument")
            value = rest.pop(0)
        if allowed != "*" and value not in allowed:
            raise ValueError(f"argument {name}: invalid choice: {value!r} (choose from {', '.join(allowed)})")
        options[name] = value
    check_options(options)
    return files, options


def check_options(options: dict[str, str | None]) -> None:
    for name in ("--framework", "--target"):
        if name not in options:
            raise ValueError(f"the following arguments are required: {name}")
    for option in (options.get("--tensorizer-options") or "").split():
        if option.partition("=")[0] not in TENSORIZER_OPTIONS:
            raise ValueError(f"tensorizer: unrecognized arguments: {option}")
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
    try:
        data = path.read_bytes()
        wire.read_module(data)
    except (OSError, ValueError, StopIteration, IndexError, KeyError) as error:
        return fail(log, "NCC_EVRF064", f"HLO verification failed: {error}")
    output.write_bytes(neff.pack(data, str(options["--target"]), int(lnc or 1)))
    sys.stdout.write("Compiler status PASS" + "\n")
    return 0


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


def refuse(message: str) -> int:
    sys.stderr.write(f"neuronx-cc: error: {message}" + "\n")
    return 2


def record(arguments: list[str], file: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("NEURON", "TMPDIR"))}
    line = {"argv": arguments, "cwd": os.getcwd(), "environment": kept, "graph": Path(file).stem}
    with open(os.environ["FAKE_NCC_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


sys.exit(main(sys.argv[1:]))
