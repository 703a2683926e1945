# SPDX-License-Identifier: Apache-2.0
"""Which operators the Neuron compiler takes: as documented, and as an installed one lists them."""

from __future__ import annotations

from collections.abc import Iterable


CUSTOM_CALLS = {
    *(f"AwsNeuron{name}" for name in (
        "Erf", "Gelu", "GeluApprxTanh", "GeluBackward", "Silu", "SiluBackward", "RmsNorm", "Softmax", "SoftmaxBackward",
        "CollectiveMatmul", "IntMatmult", "ArgMax", "ArgMin", "TopK", "DropoutMaskV1", "CustomNativeKernel", "CustomOp",
        "DevicePrint", "LNCShardingConstraint", "TransferWithStaticRing",
    )),
    *(f"AwsNeuronModuleMarker{edge}-{way}" for edge in ("Start", "End") for way in ("Forward", "Backward")),
    "NeuronBoundaryMarker-Start", "NeuronBoundaryMarker-End", "ResizeNearest", "ResizeBilinear", "ResizeNearestGrad",
    "QuantizeMX", "__op$block_scaled_dot",
}  # fmt: skip
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
    """Opcodes without dashes, from the compiler's list, which names operators as XLA's Python client did."""
    return frozenset(_SYNONYMS.get(name, name) for name in (_plain(each) for each in names)) | _STRUCTURAL


def is_listed(opcode: str, operators: frozenset[str]) -> bool:
    return _plain(opcode) in operators


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_STRUCTURAL = frozenset({"parameter", "constant", "tuple", "gettupleelement", "reshape", "bitcast", "copy"})
_SYNONYMS = {
    "broadcastindim": "broadcast", "convertelementtype": "convert", "cos": "cosine", "div": "divide",
    "dotgeneral": "dot", "eq": "compare", "exp": "exponential", "ge": "compare", "gt": "compare", "le": "compare",
    "logicaland": "and", "logicalnot": "not", "logicalor": "or", "lt": "compare", "max": "maximum", "min": "minimum",
    "mul": "multiply", "ne": "compare", "neg": "negate", "pow": "power", "rev": "reverse", "rngbitgenerator":
    "rngbitgenerator", "rnguniform": "rng", "sin": "sine", "sub": "subtract",
}  # fmt: skip
