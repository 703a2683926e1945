#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 -- a program of its own
"""Compile the modules of this folder by neuronx-cc, one after another, and write result.json after each.

It needs Python 3.9 or later and neuronx-cc, on any x86 Linux: no Neuron device, and no other package. A module that result.json has
already is left out, so that a second run continues.

    python3 run_compiler.py                     # all modules, at most 30 minutes each
    python3 run_compiler.py --minutes 120 --only hybrid_chunked_prefill
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
RESULT = HERE / "result.json"
LINE, LINES, TAIL = 300, 20, 4000  # characters of a line, lines, characters of a log's end


def main() -> None:
    """Compile what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="limit of each module (default: 30)")
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="these modules, also where result.json has them")
    args = parser.parse_args()
    modules = json.loads((HERE / "modules.json").read_text(encoding="utf-8"))["modules"]
    unknown = sorted(set(args.only or ()) - set(modules))
    if unknown:
        parser.error(f"there is no module {', '.join(unknown)}; choose from {', '.join(modules)}")
    compiler = shutil.which("neuronx-cc")
    if compiler is None:
        parser.error("there is no neuronx-cc on PATH; activate the environment that has it")
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=300, check=True)
    version = clean((asked.stdout.strip() or asked.stderr.strip()).splitlines()[0])
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"modules": {}}
    if found["modules"] and found["compiler"] != version:
        parser.error(f"result.json is of {found['compiler']}, and this is {version}; move result.json away")
    host = f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    result = {"format": 1, "compiler": version, "host": clean(host), "modules": found["modules"]}
    for name, module in modules.items():
        if name in (args.only or ()) or (args.only is None and name not in result["modules"]):
            print(f"{name} ...", flush=True)
            made = result["modules"][name] = compile_module(compiler, module, 60 * args.minutes)
            partial = RESULT.with_suffix(".partial")
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            partial.replace(RESULT)
            print(f"  {made['outcome']}, {made['seconds']} s, {made['peak_mib']} MiB", flush=True)
    print(f"{RESULT} has {len(result['modules'])} of {len(modules)} modules: please send it back")


def compile_module(compiler: str, module: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return what became of one module within `limit` seconds."""
    data = (HERE / module["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != module["sha256"]:
        raise SystemExit(f"{module['file']} is not the file that was written here; write the folder again")
    with tempfile.TemporaryDirectory(prefix="golden-") as work:
        Path(work, module["file"]).write_bytes(data)
        start, late = time.monotonic(), False
        environment = {key: value for key, value in os.environ.items() if key != "NEURON_CC_FLAGS"}
        with open(Path(work, "output.log"), "wb") as log:
            process = subprocess.Popen(
                [compiler, *module["arguments"]],
                cwd=work,
                env={**environment, "TMPDIR": work},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while True:
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended:
                    break
                if not late and time.monotonic() - start > limit:
                    late = True
                    os.killpg(process.pid, signal.SIGKILL)
                time.sleep(0.2)
        finally:  # also what a compiler that ended has left running
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.returncode = os.waitstatus_to_exitcode(status)
        text = "\n".join(path.read_text("utf-8", "replace") for path in sorted(Path(work).glob("*.log")))
        neff = Path(work, module["neff"])
        size = neff.stat().st_size if neff.is_file() else 0
        succeeded = process.returncode == 0 and size > 0
        lines = [clean(line)[:LINE] for line in text.splitlines() if re.search(r"instruction", line, re.IGNORECASE)]
        return {
            "sha256": module["sha256"],
            "outcome": "timeout" if late else "compiled" if succeeded else "failed",
            "status": process.returncode,
            "seconds": round(time.monotonic() - start, 1),
            "peak_mib": usage.ru_maxrss // 1024,
            "neff_bytes": size,
            "instructions": lines[-LINES:],
            "log": [clean(line)[:LINE] for line in text[-TAIL:].splitlines()],
        }


def clean(text: str) -> str:
    """Return a line of printable characters."""
    return "".join(each if each.isprintable() else " " for each in text)


if __name__ == "__main__":
    main()
