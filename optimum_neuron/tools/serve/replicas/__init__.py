# SPDX-License-Identifier: Apache-2.0
"""Several copies of a model at one address: Ray Serve runs and replaces them, and the front sends them requests.

Nothing here imports Ray: it reads its environment while it is imported.
"""

from __future__ import annotations

import os
import secrets


def set_ray_environment() -> bool:
    """Return whether RAY_ADDRESS names a cluster. Else let the one that Ray starts be reached by this server's processes alone.

    Ray sends no usage statistics. What the user has set stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # Ray would join any cluster of this machine when a call finds none
    if os.environ.get("RAY_ADDRESS"):
        return True
    # Ray's variable for systems on which a cluster is one machine: it then listens at the loopback, and not at all interfaces.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    return False
