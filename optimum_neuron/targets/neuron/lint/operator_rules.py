# SPDX-License-Identifier: Apache-2.0
"""Rules about operators: those that a graph may have, and in which form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....config import KERNEL_TARGETS
from ..graphs import hlo
from ..kernels.kernel import KERNEL_CALL
from .graph import INTEGERS, LintGraph, Place, Severity


TOPK_CALL = "AwsNeuronTopK"
LARGEST_TOPK = 16384
# Rows of so many values were seen to compile on trn2 for so large a k only.
LONG_ROW, LARGEST_TOPK_OF_LONG_ROW = 32768, 8


def opcodes(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF001 and EUOC002 of the SDK; what is supported: release-notes/components/compiler.rst."""
    remedy = "express it in other operators"
    for each in graph.by_id.values():
        if each.opcode in FORBIDDEN:
            continue
        known = each.opcode in SUPPORTED
        if graph.operators is not None and _plain_name(each.opcode) not in graph.operators:
            # The list leaves out operators that the SDK's own graphs are full of.
            severity: Severity = "warning" if known else "error"
            yield each, f"the installed compiler does not list {each.opcode}", remedy, severity
        elif graph.operators is None and not known:
            yield each, f"{each.opcode} is not documented as supported", remedy, "warning"


def control_flow(graph: LintGraph) -> Iterator[Place]:
    """compiler/neuronx-cc/faq.rst of the SDK: neither control flow nor shapes that depend on values."""
    for each in graph.of(*CONTROL_FLOW):
        yield each, f"a {each.opcode} is control flow", "unroll it, or decide on the host", "error"


def host_transfers(graph: LintGraph) -> Iterator[Place]:
    """Error code EVRF001 of the SDK: a NEFF runs on the device alone."""
    for each in graph.of(*HOST):
        yield each, f"a {each.opcode} talks to the host within a step", "pass it as an input or output", "error"


def random(graph: LintGraph) -> Iterator[Place]:
    """Error code EVRF006 of the SDK; its list of operators says that RngBitGenerator ignores the user's seed."""
    for each in graph.of(*RANDOM):
        yield each, "random numbers of the device ignore seeds", "pass uniform numbers as an input", "error"


def reduce_windows(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF017 to EVRF019 of the SDK. torch-xla makes one of every cumulative operator; sums are written otherwise (lowering/decompositions.py)."""
    for each in graph.of("reduce-window"):
        yield each, "a reduce-window, as of cumprod", "multiply by a triangle of ones", "error"


def sorts(graph: LintGraph) -> Iterator[Place]:
    """Error code EVRF029, seen on trn2 by public ports; api-torch-neuronx-trace.rst of the SDK names sort as unsupported.

    One of the ways to a NEFF turns a sort with a kept beginning into AwsNeuronTopK (aws-neuron-sdk issue 1339), the others do not.
    """
    remedy = (
        "take the largest one by one, as torch.topk is lowered up to k = 16, or count what is larger than a threshold"
    )
    for each in graph.of(*SORTS):
        source = graph.operands(each)[0].shape
        yield each, f"a {each.opcode} of {hlo.dtype_name(source)}{list(source.dimensions)}", remedy, "error"


def top_k_calls(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF013 and EVRF014 of the SDK (aws-neuron-sdk issue 1339); unsigned indices as nkipy's emitter writes them.

    Rows of 32,768 values were reported to compile on trn2 for k <= 8 only.
    """
    for each in graph.of("custom-call"):
        if each.custom_call_target != TOPK_CALL:
            continue
        keys, results = graph.operands(each)[0].shape, list(each.shape.tuple_shapes)
        if hlo.dtype_name(keys) in INTEGERS:
            yield each, f"a top-k of {hlo.dtype_name(keys)}", "convert the scores to float32 first", "error"
        if len(results) != 2 or hlo.dtype_name(results[1]) != "uint32":
            yield each, "a top-k with a second result that is not uint32 indices", "declare indices as uint32", "error"
        k = max((shape.dimensions[-1] for shape in results if shape.dimensions), default=0)
        limit = LARGEST_TOPK_OF_LONG_ROW if keys.dimensions[-1] >= LONG_ROW else LARGEST_TOPK
        if k > limit:
            problem = f"a top-k with k = {k} of {keys.dimensions[-1]} values, above {limit}"
            yield each, problem, "search a threshold by counting what is larger", "error"


def custom_calls(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF015 and EHCA005 of the SDK; its page lists the targets that the compiler knows.

    Calls of kernels become one of these when they are compiled. NKI compiles for NeuronCore-v3 and later since its release 0.3.
    """
    for each in graph.of("custom-call"):
        if each.custom_call_target == KERNEL_CALL:
            if graph.target not in KERNEL_TARGETS:
                problem = f"the kernel {each.backend_config.decode()}, which is for {' and '.join(KERNEL_TARGETS[2:])}"
                yield each, problem, "lower it without kernels", "error"
            continue
        if not each.custom_call_target.startswith(CUSTOM_CALLS):
            problem = f"custom call {each.custom_call_target} is not one that the compiler knows"
            yield each, problem, "express it in HLO operators", "error"


def slices(graph: LintGraph) -> Iterator[Place]:
    """release-notes/components/compiler.rst of the SDK: DynamicUpdateSlice with a constant index only."""
    for each in graph.of("dynamic-slice", "dynamic-update-slice"):
        indices = graph.operands(each)[1 if each.opcode == "dynamic-slice" else 2 :]
        if any(index.opcode != "constant" for index in indices):
            yield each, f"a {each.opcode} with a computed start", "use gather, scatter or index_select", "error"


def convolutions(graph: LintGraph) -> Iterator[Place]:
    """Error codes EVRF010 and EVRF011 of the SDK: dilation of the input together with that of the kernel, or with a stride."""
    for each in graph.of("convolution"):
        dimensions = each.window.dimensions
        if not any(dimension.base_dilation > 1 for dimension in dimensions):
            continue
        if any(dimension.window_dilation > 1 for dimension in dimensions):
            yield each, "a convolution that dilates its input and its kernel", "dilate one of them only", "error"
        if any(dimension.stride > 1 for dimension in dimensions):
            yield each, "a convolution that dilates its input and takes strides", "do one of them only", "error"


def reductions(graph: LintGraph) -> Iterator[Place]:
    """release-notes/components/compiler.rst of the SDK: Reduce begins with a constant."""
    for each in graph.of("reduce"):
        operands = graph.operands(each)
        if any(graph.origin(start).opcode != "constant" for start in operands[len(operands) // 2 :]):
            yield each, "a reduce that begins with a computed number", "begin with a constant, add it after", "error"


def strided_stores(graph: LintGraph) -> Iterator[Place]:
    """longdct/vllm-neuron, neuron-lowering-pitfalls.md: a partial store of stride 2 does not lower."""
    remedy = "write whole groups of neighbours, or select between old and new values"
    for each in graph.of("pad"):
        if any(dimension.interior_padding > 0 for dimension in each.padding_config.dimensions):
            yield each, "a pad between values, which stores with a stride", remedy, "error"
    for each in graph.of("scatter"):
        sizes, numbers = graph.operands(each)[0].shape.dimensions, each.scatter_dimension_numbers
        indexed = set(numbers.scatter_dims_to_operand_dims)
        inserted = set(numbers.inserted_window_dims)
        whole = [axis for axis, size in enumerate(sizes) if size > 1 and axis not in inserted]
        if any(axis > min(whole, default=len(sizes)) for axis in indexed & inserted if sizes[axis] > 1):
            yield each, "a scatter of columns, which stores with a stride", remedy, "error"


# How the targets begin that the compiler knows.
CUSTOM_CALLS = (
    "AwsNeuron",
    "NeuronBoundaryMarker-",
    "ResizeNearest",
    "ResizeBilinear",
    "QuantizeMX",
    "__op$block_scaled_dot",
)
# Named as supported by the compiler's release notes or emitted by the SDK's own model code.
SUPPORTED = {
    "abs", "add", "all-gather", "all-reduce", "all-to-all", "and", "atan2", "batch-norm-grad", "batch-norm-inference",
    "batch-norm-training", "bitcast", "bitcast-convert", "broadcast", "ceil", "clamp", "compare", "concatenate", "constant",
    "convert", "convolution", "copy", "cosine", "custom-call", "divide", "dot", "dynamic-slice", "dynamic-update-slice",
    "exponential", "exponential-minus-one", "floor", "gather", "get-tuple-element", "iota", "log", "log-plus-one",
    "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "pad", "parameter", "power", "reduce",
    "reduce-scatter", "reshape", "reverse", "rsqrt", "scatter", "select", "select-and-scatter", "shift-right-logical",
    "sign", "sine", "slice", "sqrt", "subtract", "tan", "tanh", "transpose", "tuple",
}  # fmt: skip
CONTROL_FLOW = {"while", "conditional", "call", "fusion"}
HOST = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
RANDOM = {"rng", "rng-bit-generator", "rng-get-and-update-state"}
SORTS = {"sort", "topk"}
# Have a rule, hence a remedy, of their own.
FORBIDDEN = CONTROL_FLOW | HOST | RANDOM | SORTS | {"reduce-window"}


def normalize_operators(names: Iterable[str]) -> frozenset[str]:
    """Return opcodes without dashes, from the compiler's list, which names operators as XLA's Python client did."""
    return frozenset(_SYNONYMS.get(name, name) for name in map(_plain_name, names)) | _STRUCTURAL


def _plain_name(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_STRUCTURAL = frozenset({"parameter", "constant", "tuple", "gettupleelement", "reshape", "bitcast", "copy"})
_SYNONYMS = {
    "broadcastindim": "broadcast", "convertelementtype": "convert", "cos": "cosine", "div": "divide",
    "dotgeneral": "dot", "eq": "compare", "exp": "exponential", "ge": "compare", "gt": "compare", "le": "compare",
    "logicaland": "and", "logicalnot": "not", "logicalor": "or", "lt": "compare", "max": "maximum", "min": "minimum",
    "mul": "multiply", "ne": "compare", "neg": "negate", "pow": "power", "rev": "reverse", "rngbitgenerator":
    "rngbitgenerator", "rnguniform": "rng", "sin": "sine", "sub": "subtract",
}  # fmt: skip
