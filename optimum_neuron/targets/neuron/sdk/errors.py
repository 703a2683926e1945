# SPDX-License-Identifier: Apache-2.0
"""Codes of neuronx-cc and of the Neuron runtime: their meaning, whether a process can continue, and the remedy."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass


_LINT = "optimum-cli neuron lint names the module of the model that it comes from"
_SMALLER = "lower batch_size, sequence_length or prefill_chunk_size, or raise tensor_parallel_size"
_FLOAT = "the model computes with integers where the device has no integer unit; " + _LINT
_TYPE = "export with dtype='bfloat16' or 'float32'"
_LNC = "set NEURON_LOGICAL_NC_CONFIG=1 for inf2 and trn1, 1 or 2 for the others"
_SHAPES = "export with the same sizes and a current version of this package; " + _LINT
_MX = "block-scaled weights are not supported; export an unquantized checkpoint"
_REPORT = "report it to AWS with the log, or choose another level with NEURON_CC_FLAGS=-O1, -O2 or -O3"
# Codes that mean the same, the rule that a graph broke, and the remedy.
_RULES = (
    ("EARG001", "the target's cores cannot be grouped like that", _LNC),
    ("EBIR023", "a fused MLP is wider than 4096 per core", "raise tensor_parallel_size"),
    ("EBVF030 EVRF007 EXTP004", "the graph has too many instructions", "raise tensor_parallel_size, or lower prefill_chunk_size"),
    ("EHCA005 EVRF015", "a custom call of the graph is not known", _LINT),
    ("EMOD025", "a tensor has a dynamic shape", _SHAPES),
    ("EOOM001 EOOM002 EVRF009 EXSP001", "the graph's tensors exceed the memory of a core", _SMALLER),
    ("ESFH002", "a 64-bit constant does not fit 32 bits", _LINT),
    ("ESPP004", "a data type is not supported", _TYPE),
    ("ESPP047 EVRF005", "an 8-bit float type is not supported", _TYPE),
    ("EUOC002 EVRF001", "an operator of the graph is not supported", _LINT),
    ("EVRF004", "the graph has complex numbers", _LINT),
    ("EVRF006", "random numbers come from an algorithm that is not the default", _LINT),
    ("EVRF010 EVRF011", "a convolution is dilated in a way that is not supported", _LINT),
    ("EVRF013", "top-k of integers is not supported", _LINT),
    ("EVRF014", "a sort or top-k returns more than 16,384 values", _LINT),
    ("EVRF016", "a scatter that adds has integer or boolean data", _FLOAT),
    ("EVRF017 EVRF018 EVRF019", "a reduce-window has dilation or more than one operand", _LINT),
    ("EVRF022", "a right shift is not on 32 bits", _LINT),
    ("EVRF029", "a sort is not supported on this target", _LINT),
    ("EVRF031", "a scatter's indices exceed its operand", _SHAPES),
    ("EVRF035", "a matrix product has integer operands", _FLOAT),
    ("EOCP001", "float8_e4m3 and float8_e4m3fn are in one graph", _TYPE),
    ("EVRF051", "float8_e4m3fn is not supported before trn3 without an option", _TYPE),
    ("EVRF052", "float8_e4m3 is not supported after trn3", _TYPE),
    ("EVRF056", "a gather's indices exceed its operand", "lower sequence_length to the model's own limit"),
    ("EVRF059", "a kernel's file is missing", _SHAPES),
    ("EVRF060", "a scatter computes with integers", _FLOAT),
    ("EVRF061", "an all-reduce has integers", _FLOAT),
    ("EVRF062", "a power has 64-bit integers", _FLOAT),
    ("EVRF063", "a reduce-scatter has integers", _FLOAT),
    ("EVRF064", "shapes of the graph contradict each other", _SHAPES),
    ("EVRF065", "a kernel was traced with another version of NKI", _SHAPES),
    *((f"EVRF{number:03}", "a block-scaled matrix product is malformed", _MX) for number in (*range(36, 51), 53, 54, 55, 57, 58)),
)  # fmt: skip
COMPILER_RULES = {code: (rule, remedy) for codes, rule, remedy in _RULES for code in codes.split()}
_INTERNAL = "the compiler failed in its own code", _REPORT
_UNKNOWN = "the compiler refused the graph", _LINT
_CODE = re.compile(r"NCC_([A-Z]+\d+)")
_SIGNALS = {
    signal.SIGKILL: "killed, which is how Linux ends a process when memory runs out; "
    "compile on a machine with more memory",
    signal.SIGABRT: f"aborted by a defect of its own; {_REPORT}",
    signal.SIGSEGV: f"crashed; {_REPORT}",
}
# Longer tails bury the sentence in a terminal; the first codes are the cause of the later ones.
_TAIL, _CODES_SHOWN = 1500, 2


def explain_failure(status: int, output: str) -> str:
    """Explain a compiler that ended with `status`: one sentence, by the NCC codes in its output, then the end of that."""
    parts = []
    for code in list(dict.fromkeys(_CODE.findall(output)))[:_CODES_SHOWN]:
        rule, remedy = COMPILER_RULES.get(code, _INTERNAL if code.startswith("I") else _UNKNOWN)
        parts.append(f"NCC_{code}: {rule}; {remedy}")
    reason = "; ".join(parts)
    if not reason and "No space left on device" in output:
        reason = "the disk is full; free space, or set TMPDIR and OPTIMUM_NEURON_CACHE to another disk"
    if not reason and status < 0:
        reason = f"it was {_SIGNALS.get(signal.Signals(-status), f'ended by signal {-status}')}"
    tail = output.strip()[-_TAIL:]
    return f"the compiler ended with status {status}{': ' if reason else ''}{reason}" + (f"\n{tail}" if tail else "")


@dataclass(frozen=True)
class NrtStatus:
    """A status code of nrt_status.h; `recoverable` where the step failed, and this process can use the device again."""

    name: str
    recoverable: bool
    meaning: str
    remedy: str


_RESTART = "end this process and load the model again; if it returns, reboot or replace the instance"
_EXPORT = "export the model again with this machine's SDK"
_LESS = "lower batch_size or sequence_length, or raise tensor_parallel_size"
_NEIGHBOURS = "neuron-ls shows which process holds the cores; end it, or choose others by NEURON_RT_VISIBLE_CORES"
_NAN = "a weight or an input is not finite, or float16 overflowed; export with dtype='bfloat16' or 'float32'"
_TOO_LONG = "raise NEURON_RT_EXEC_TIMEOUT or rank_timeout if the step is that long, else load the model again"
_DEFECT = "this is a defect of this package; report it with the log"

INVALID = 2
NRT_STATUSES: dict[int, NrtStatus] = {
    1: NrtStatus("NRT_FAILURE", False, "an operation failed for no stated reason", "read the log lines above; " + _RESTART),
    INVALID: NrtStatus("NRT_INVALID", True, "the NEFF is not valid, or a tensor's name or size is not the NEFF's", _EXPORT),
    3: NrtStatus("NRT_INVALID_HANDLE", False, "a tensor or a graph was used after it was freed", _DEFECT),
    4: NrtStatus("NRT_RESOURCE", True, "the device has no memory left", _LESS),
    5: NrtStatus("NRT_TIMEOUT", False, "the step did not finish in time", _TOO_LONG),
    6: NrtStatus("NRT_HW_ERROR", False, "the device failed, or the NEFF is for another generation", _RESTART),
    7: NrtStatus("NRT_QUEUE_FULL", True, "too many steps wait on the device", "run the step again"),
    9: NrtStatus("NRT_LOAD_NOT_ENOUGH_NC", True, "too few NeuronCores are free", _NEIGHBOURS),
    10: NrtStatus("NRT_UNSUPPORTED_NEFF_VERSION", True, "the runtime is older than the compiler was", _EXPORT),
    11: NrtStatus("NRT_FAIL_HOST_MEM_ALLOC", True, "the host has no memory left", "free memory or use a larger instance"),
    13: NrtStatus("NRT_UNINITIALIZED", False, "the runtime was never started", _RESTART),
    14: NrtStatus("NRT_CLOSED", False, "the runtime was closed", "load the model again"),
    15: NrtStatus("NRT_QUEUE_EMPTY", True, "nothing was queued on the device", "run the step again"),
    101: NrtStatus("NRT_EXEC_UNIT_UNRECOVERABLE", False, "the core's execution unit cannot recover", _RESTART),
    1002: NrtStatus("NRT_EXEC_BAD_INPUT", True, "an input has the wrong shape or type", _DEFECT),
    1003: NrtStatus("NRT_EXEC_COMPLETED_WITH_NUM_ERR", True, "the step produced NaN", _NAN),
    1004: NrtStatus("NRT_EXEC_COMPLETED_WITH_ERR", True, "the step ended with an error", "run it again; " + _RESTART),
    1005: NrtStatus("NRT_EXEC_NC_BUSY", True, "another model or process uses the core", _NEIGHBOURS),
    1006: NrtStatus("NRT_EXEC_OOB", True, "the step wrote or read outside of a tensor", _DEFECT),
    1100: NrtStatus("NRT_COLL_PENDING", True, "a collective operation is still pending", "run the step again"),
    1200: NrtStatus("NRT_EXEC_HW_ERR_COLLECTIVES", False, "a collective operation is stuck: a rank is missing", _RESTART),
    1201: NrtStatus("NRT_EXEC_HW_ERR_HBM_UE", False, "device memory has an error that cannot be repaired", _RESTART),
    1202: NrtStatus("NRT_EXEC_HW_ERR_NC_UE", False, "the core's own memory has a parity error", _RESTART),
    1203: NrtStatus("NRT_EXEC_HW_ERR_DMA_ABORT", False, "a DMA engine failed", _RESTART),
    1204: NrtStatus("NRT_EXEC_SW_NQ_OVERFLOW", False, "the notification queue overflowed", _RESTART),
    1205: NrtStatus("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", False, "device memory has an error; a reset repairs it", _RESTART),
    1206: NrtStatus("NRT_NETWORK_PROXY_FAILURE", False, "the network between instances failed", _RESTART),
}  # fmt: skip
_CODES = {status.name: code for code, status in NRT_STATUSES.items()}
# What the torch packages say where they do not pass a status on.
_PHRASES = {
    "could not be initialized": 9,
    "not available - Requested": 9,
    "No neuron device available": 9,
    "Failed to allocate": 4,
}
_NAME_AND_CODE = re.compile(r"\b(NRT_[A-Z_]+)(?:\((\d+)\))?")
_STATUS_NUMBER = re.compile(r"\bstatus(?: code)?\s*[:=]?\s*(\d+)", re.IGNORECASE)


class NeuronRuntimeError(RuntimeError):
    """A failure of the device or its runtime, with a `code` of nrt_status.h, if there is one; if not `recoverable`, the process has to end."""

    def __init__(self, message: str, *, code: int | None = None, recoverable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.recoverable = recoverable


def status_code(text: str) -> int | None:
    """Return the NRT status that an error message of a runtime names; None where it names none that is known."""
    for name, number in _NAME_AND_CODE.findall(text):
        # Where both are given, the number is what the C library returned.
        code = int(number) if number and int(number) in NRT_STATUSES else _CODES.get(name)
        if code is not None:
            return code
    for number in _STATUS_NUMBER.findall(text):
        if int(number) in NRT_STATUSES:
            return int(number)
    return next((code for phrase, code in _PHRASES.items() if phrase in text), None)


def runtime_error(text: str, doing: str) -> NeuronRuntimeError:
    """Return the error to raise for a runtime's text; `doing` names the step or file."""
    code = status_code(text)
    first = text.partition("\n")[0][:300]
    if code is None:
        return NeuronRuntimeError(f"{doing} failed: {first}; {NRT_STATUSES[1].remedy}")
    status = NRT_STATUSES[code]
    message = f"{doing} failed with {status.name} ({code}): {status.meaning}; {status.remedy} [{first}]"
    return NeuronRuntimeError(message, code=code, recoverable=status.recoverable)


def missing_library(error: str, doing: str) -> NeuronRuntimeError:
    """Return the error to raise where a runtime's package could not be imported."""
    return NeuronRuntimeError(
        f"{doing} failed: it cannot be imported ({error}); it needs the system package aws-neuronx-runtime-lib, and "
        f"/opt/aws/neuron/lib in LD_LIBRARY_PATH"
    )
