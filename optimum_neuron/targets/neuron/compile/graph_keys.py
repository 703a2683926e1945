# SPDX-License-Identifier: Apache-2.0
"""What the compiler reads of a graph, as a digest: the key of its entry in the compile cache, the same on every machine.

That is the HLO, the target, the options and the compiler's version. Weights, folders, what parameters are bound to, and the version
of this package are in no key: no NEFF depends on them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

from ..kernels.registry import KERNELS
from ..lowering import hlo
from ..lowering.kernel_calls import called_kernels, without_references
from ..sdk.flags import FLAGS_VARIABLE, add_user_flags, compiler_flags
from .native_kernels import kernel_versions
from .neuron_cc import DISTRIBUTION


def graph_flags(target: str, kind: str, lnc: int, version: str, *, has_fp8: bool = False) -> tuple[str, ...]:
    """The compiler's options for a graph, with those of NEURON_CC_FLAGS.

    Args:
        has_fp8: whether it takes weights of float8_e4m3fn.

    Raises:
        ValueError: the variable asks for what the target cannot do.
    """
    flags = compiler_flags(target, kind, lnc=lnc, compiler_version=version, has_fp8=has_fp8)
    return add_user_flags(flags, os.environ.get(FLAGS_VARIABLE, ""), target)


def graph_key(data: bytes, target: str, flags: Sequence[str], version: str) -> str:
    """The key of a graph's NEFF.

    Args:
        data: the graph's HLO, as an artifact has it.
        flags: the compiler's options, which tell the size of a logical core, too.
        version: the compiler's.
    """
    described: list[object] = [DISTRIBUTION, version, target, list(flags)]
    kernels = called_kernels(data)
    if kernels:
        # What NKI is given of a kernel is not in the HLO; what is executed in the kernel's place is no part of what is compiled.
        described += [{name: _call(name) for name in sorted(kernels)}, kernel_versions(data)]
        data = hlo.serialize(without_references(hlo.parse(data)))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def _call(name: str) -> list[object]:
    kernel = KERNELS[name]
    arguments = {argument: repr(value) for argument, value in kernel.arguments.items()}
    return [kernel.module, kernel.function, list(kernel.operands), arguments]
