# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import time
from pathlib import Path

from libneuronxla import neuron_xla_compile
from torch_neuronx.utils.utils import get_platform_target

from .model_builder_utils import CompilationArtifacts


def compile(hlo_module, metaneff, compiler_workdir=None, compiler_args=None, key=None):
    if not hlo_module or not metaneff:
        raise ValueError("Required compile arguments missing")
    folder = Path(compiler_workdir or "/tmp/nxd_models") / key / str(time.time_ns())
    folder.mkdir(parents=True)
    arguments = compiler_args or "--enable-saturate-infinity --auto-cast=none --model-type=transformer -O1"
    # Defaults for what the caller left out; the level is only recognized as -O<digit>.
    if "--auto-cast" not in arguments:
        arguments += " --auto-cast=none"
    if not re.search(r"-O\d+", arguments):
        arguments += " -O1"
    if "--verbose" not in arguments:
        arguments += " --verbose=35"
    if "--logfile" not in arguments:
        arguments += f" --logfile={folder.absolute() / 'log-neuron-cc.txt'}"
    try:
        neff = neuron_xla_compile(
            module_bytes=hlo_module.SerializeToString(),
            compiler_flags=arguments,
            input_format="hlo",
            platform_target=get_platform_target(arguments),
            cache_key=None,
            retry_failed_compilation=False,
            lazy=True,
            use_cache=False,
            cache_dir=None,
            work_dir=folder.absolute(),
        )
    except Exception as error:
        raise RuntimeError(f"Compilation failed for {key}") from error
    (folder / "graph.neff").write_bytes(neff)
    (folder / "metaneff.pb").write_bytes(metaneff.SerializeToString())
    return CompilationArtifacts(neff_filepath=str(folder / "graph.neff"))
