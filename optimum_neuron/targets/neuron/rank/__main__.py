# SPDX-License-Identifier: Apache-2.0
"""Starts worker.py in the interpreter that runs this folder: `PYTHON FOLDER probe`, or `PYTHON FOLDER serve SOCKET MEMORY EVENTS`.

The package has a name of its own here, so the package around it need not be installed, and no folder is searched. An interpreter that is
too old for the other files reports its version by this one.
"""

import json
import os
import sys


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036  older ones run this file, too
        sys.stdout.write(json.dumps({"python": sys.version.split()[0]}) + "\n")
        sys.exit(0)
    import importlib
    import importlib.util

    folder = os.path.dirname(os.path.abspath(__file__))
    # Python puts it there; its modules are no packages of their own.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.util.spec_from_file_location(
        "optimum_neuron_rank", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        sys.exit("no Python package in " + folder)
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    importlib.import_module(spec.name + ".worker").main(sys.argv[1:])
