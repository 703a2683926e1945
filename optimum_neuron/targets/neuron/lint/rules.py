# SPDX-License-Identifier: Apache-2.0
"""The rules of the lint: what compiler and device refuse, or have been seen to compute wrongly. Add a rule to RULES.

The docstring of each names its source: the Neuron SDK's error-code pages, its runtime's status codes, or a public report.
"""

from __future__ import annotations

from . import interface_rules as interface
from . import operator_rules as operators
from . import traffic_rules as traffic
from . import value_rules as values
from .graph import Rule


# Raised with every change of what graphs pass: what an earlier version let pass is to be checked again.
RULES_VERSION = 7

RULES = (
    Rule("opcode", "EVRF001", operators.opcodes),
    Rule("control-flow", "EVRF001", operators.control_flow),
    Rule("host-transfer", "EVRF001", operators.host_transfers),
    Rule("random", "EVRF006", operators.random),
    Rule("reduce-window", "EVRF017-019", operators.reduce_windows),
    Rule("sort", "EVRF029", operators.sorts),
    Rule("top-k-call", "EVRF013, EVRF014", operators.top_k_calls),
    Rule("custom-call", "EVRF015", operators.custom_calls),
    Rule("dynamic-slice", "EVRF001", operators.slices),
    Rule("convolution", "EVRF010, EVRF011", operators.convolutions),
    Rule("reduction", "EVRF001", operators.reductions),
    Rule("strided-store", "", operators.strided_stores),
    Rule("type", "EVRF004, EVRF005, EVRF051, ESPP004", values.types),
    Rule("dynamic-shape", "EMOD025", values.dynamic_shapes),
    Rule("integer-compute", "EVRF016, EVRF022, EVRF035, EVRF060-063", values.integer_compute),
    Rule("unsigned", "", values.unsigned),
    Rule("index-range", "EVRF031, EVRF056, NRT 1006", values.index_ranges),
    Rule("constant", "NRT 1003", values.constants),
    Rule("mask-sum", "NRT 1003", values.mask_sums),
    Rule("flat-split", "", values.flat_splits),
    Rule("dead-operand", "", values.dead_operands),
    Rule("alias", "EVRF064", interface.aliases),
    Rule("binding", "EVRF064", interface.bindings),
    Rule("collective", "", interface.collectives),
    Rule("scores", "", traffic.attention_scores),
    Rule("memory", "EVRF009, EOOM001", interface.memory),
    Rule("transposed-weight", "", traffic.transposed_weights),
    Rule("scaled-weight", "", traffic.scaled_weights),
    Rule("coded-state", "", traffic.coded_states),
)
