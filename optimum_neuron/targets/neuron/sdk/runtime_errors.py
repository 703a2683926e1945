# SPDX-License-Identifier: Apache-2.0
"""Errors of the Neuron runtime: the meaning of a status code, whether the process can continue, and the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class NrtStatus:
    """A status code of nrt_status.h.

    Attributes:
        recoverable: whether this process can use the device again: the step failed, the session did not.
    """

    name: str
    recoverable: bool
    meaning: str
    remedy: str


_RESTART = "end this process and load the model again; if it returns, reboot or replace the instance"
_EXPORT = "export the model again with this machine's SDK"
_SMALLER = "lower batch_size or sequence_length, or raise tensor_parallel_size"
_NEIGHBOURS = (
    "neuron-ls shows which process holds the cores; end it, or choose other cores with NEURON_RT_VISIBLE_CORES"
)
_NAN = "a weight or an input is not finite, or float16 overflowed; export with dtype='bfloat16' or 'float32'"
_TOO_LONG = "raise NEURON_RT_EXEC_TIMEOUT or rank_timeout if the step is that long, else load the model again"
_DEFECT = "this is a defect of this package; report it with the log"

INVALID = 2
NRT_STATUSES: dict[int, NrtStatus] = {
    1: NrtStatus("NRT_FAILURE", False, "an operation failed for no stated reason", "read the log lines above; " + _RESTART),
    INVALID: NrtStatus("NRT_INVALID", True, "the NEFF is not valid, or a tensor's name or size is not the NEFF's", _EXPORT),
    3: NrtStatus("NRT_INVALID_HANDLE", False, "a tensor or a graph was used after it was freed", _DEFECT),
    4: NrtStatus("NRT_RESOURCE", True, "the device has no memory left", _SMALLER),
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
    """A failure of the device or its runtime.

    Attributes:
        code: of nrt_status.h; None where the runtime gave none.
        recoverable: whether the loaded model can continue; otherwise the process has to end.
    """

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
