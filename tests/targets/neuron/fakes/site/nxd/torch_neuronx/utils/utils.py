# SPDX-License-Identifier: Apache-2.0

import os
import shlex


SUPPORTED_TYPES = ("inf2", "trn1", "trn1n", "trn2")


def get_platform_target(compiler_args=""):
    """The target named by the arguments, else by the environment."""
    for token in shlex.split(compiler_args):
        if token.startswith("--target="):
            return token.partition("=")[2]
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    if target is None:
        raise RuntimeError("Unsupported Platform: this is no Neuron instance")
    return target
