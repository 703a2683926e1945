# SPDX-License-Identifier: Apache-2.0
"""Error codes of neuronx-cc: the rule that a graph broke, and what to change."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class CompilerRule:
    """The meaning of an NCC code."""

    rule: str
    remedy: str


_LINT = "optimum-cli neuron lint names the module of the model that it comes from"
_SMALLER = "lower batch_size, sequence_length or prefill_chunk_size, or raise tensor_parallel_size"
_FEWER = "raise tensor_parallel_size, or lower prefill_chunk_size"
_FLOAT = "the model computes with integers where the device has no integer unit; " + _LINT
_TYPE = "export with dtype='bfloat16' or 'float32'"
_LNC = "set NEURON_LOGICAL_NC_CONFIG=1 for inf2 and trn1, 1 or 2 for the others"
_SHAPES = "export with the same sizes and a current version of this package; " + _LINT
_MX = "block-scaled weights are not supported; export an unquantized checkpoint"
_REPORT = "report it to AWS with the log, or choose another level with NEURON_CC_FLAGS=-O1, -O2 or -O3"
_MEMORY = CompilerRule("the graph's tensors exceed the memory of a core", _SMALLER)
_LENGTH = CompilerRule("the graph has too many instructions", _FEWER)
_OPERATOR = CompilerRule("an operator of the graph is not supported", _LINT)
_CUSTOM_CALL = CompilerRule("a custom call of the graph is not known", _LINT)
_CONVOLUTION = CompilerRule("a convolution is dilated in a way that is not supported", _LINT)
_WINDOW = CompilerRule("a reduce-window has dilation or more than one operand", _LINT)

COMPILER_RULES: dict[str, CompilerRule] = {
    "EARG001": CompilerRule("the target's cores cannot be grouped like that", _LNC),
    "EBIR023": CompilerRule("a fused MLP is wider than 4096 per core", "raise tensor_parallel_size"),
    "EBVF030": _LENGTH,
    "EHCA005": _CUSTOM_CALL,
    "EMOD025": CompilerRule("a tensor has a dynamic shape", _SHAPES),
    "EOOM001": _MEMORY,
    "EOOM002": _MEMORY,
    "ESFH002": CompilerRule("a 64-bit constant does not fit 32 bits", _LINT),
    "ESPP004": CompilerRule("a data type is not supported", _TYPE),
    "ESPP047": CompilerRule("an 8-bit float type is not supported", _TYPE),
    "EUOC002": _OPERATOR,
    "EVRF001": _OPERATOR,
    "EVRF004": CompilerRule("the graph has complex numbers", _LINT),
    "EVRF005": CompilerRule("an 8-bit float type is not supported", _TYPE),
    "EVRF006": CompilerRule("random numbers come from an algorithm that is not the default", _LINT),
    "EVRF007": _LENGTH,
    "EVRF009": _MEMORY,
    "EVRF010": _CONVOLUTION,
    "EVRF011": _CONVOLUTION,
    "EVRF013": CompilerRule("top-k of integers is not supported", _LINT),
    "EVRF014": CompilerRule("a sort or top-k returns more than 16,384 values", _LINT),
    "EVRF015": _CUSTOM_CALL,
    "EVRF016": CompilerRule("a scatter that adds has integer or boolean data", _FLOAT),
    "EVRF017": _WINDOW,
    "EVRF018": _WINDOW,
    "EVRF019": _WINDOW,
    "EVRF022": CompilerRule("a right shift is not on 32 bits", _LINT),
    "EVRF029": CompilerRule("a sort is not supported on this target", _LINT),
    "EVRF031": CompilerRule("a scatter's indices exceed its operand", _SHAPES),
    "EVRF035": CompilerRule("a matrix product has integer operands", _FLOAT),
    "EVRF051": CompilerRule("float8_e4m3fn is not supported before trn3", _TYPE),
    "EVRF052": CompilerRule("float8_e4m3 is not supported after trn3", _TYPE),
    "EVRF056": CompilerRule("a gather's indices exceed its operand", "lower sequence_length to the model's own limit"),
    "EVRF059": CompilerRule("a kernel's file is missing", _SHAPES),
    "EVRF060": CompilerRule("a scatter computes with integers", _FLOAT),
    "EVRF061": CompilerRule("an all-reduce has integers", _FLOAT),
    "EVRF062": CompilerRule("a power has 64-bit integers", _FLOAT),
    "EVRF063": CompilerRule("a reduce-scatter has integers", _FLOAT),
    "EVRF064": CompilerRule("shapes of the graph contradict each other", _SHAPES),
    "EVRF065": CompilerRule("a kernel was traced with another version of NKI", _SHAPES),
    "EXSP001": _MEMORY,
    "EXTP004": _LENGTH,
}  # fmt: skip
COMPILER_RULES |= {
    f"EVRF{number:03}": CompilerRule("a block-scaled matrix product is malformed", _MX)
    for number in (*range(36, 51), 53, 54, 55, 57, 58)
}
_INTERNAL = CompilerRule("the compiler failed in its own code", _REPORT)
_UNKNOWN = CompilerRule("the compiler refused the graph", _LINT)
_CODE = re.compile(r"NCC_([A-Z]+\d+)")
_SIGNALS = {
    signal.SIGKILL: "killed, which is how Linux ends a process when memory runs out; "
    "compile on a machine with more memory",
    signal.SIGABRT: f"aborted by a defect of its own; {_REPORT}",
    signal.SIGSEGV: f"crashed; {_REPORT}",
}
# Longer tails bury the sentence in a terminal; the first codes are the cause of the later ones.
_TAIL, _CODES_SHOWN = 1500, 2


def explain_codes(output: str) -> str:
    """Return the NCC codes in a compiler's output with rule and remedy; nothing where it names none."""
    codes = list(dict.fromkeys(_CODE.findall(output)))[:_CODES_SHOWN]
    parts = []
    for code in codes:
        rule = COMPILER_RULES.get(code, _INTERNAL if code.startswith("I") else _UNKNOWN)
        parts.append(f"NCC_{code}: {rule.rule}; {rule.remedy}")
    return "; ".join(parts)


def explain_failure(status: int, output: str) -> str:
    """Explain a compiler that ended with `status`: one sentence, then the end of its output."""
    reason = explain_codes(output)
    if not reason and "No space left on device" in output:
        reason = "the disk is full; free space, or set TMPDIR and OPTIMUM_NEURON_CACHE to another disk"
    if not reason and status < 0:
        reason = f"it was {_SIGNALS.get(signal.Signals(-status), f'ended by signal {-status}')}"
    text = output.strip()
    tail = f"\n{text[-_TAIL:]}" if text else ""
    return f"the compiler ended with status {status}{': ' if reason else ''}{reason}{tail}"
