# SPDX-License-Identifier: Apache-2.0
"""Fake of libneuronxla: calls the compiler command."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path


def neuron_xla_compile(
    module_bytes,
    compiler_flags,
    input_format="hlo",
    platform_target="trn1",
    cache_key=None,
    retry_failed_compilation=False,
    lazy=True,
    use_cache=True,
    cache_dir=None,
    work_dir=None,
    create_subdir=True,
):
    if input_format != "hlo" or use_cache or not isinstance(work_dir, Path):
        raise ValueError("the fake knows only how neuronx_distributed calls this")
    hlo, neff = work_dir / "model.hlo_module.pb", work_dir / "model.neff"
    hlo.write_bytes(module_bytes)
    argv = [
        shutil.which("neuronx-cc"),
        "compile",
        "--framework=XLA",
        str(hlo),
        f"--output={neff}",
        f"--target={platform_target}",
        *shlex.split(compiler_flags),
    ]
    answer = subprocess.run(argv, cwd=work_dir, check=False)
    if answer.returncode != 0:
        raise RuntimeError(f"Failed compilation with {argv[0]}: status {answer.returncode}")
    return neff.read_bytes()
