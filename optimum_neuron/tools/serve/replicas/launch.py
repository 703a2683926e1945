# SPDX-License-Identifier: Apache-2.0
"""`neuron serve --replicas`: a cluster of Ray, the replicas in it, and the front before them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from ....artifact.artifact import Artifact
from ....kernels.host.machine import usable_cores
from ....targets.neuron.sdk.devices import check_devices, show_cores
from ....targets.neuron.sdk.hardware import CHIPS
from ..gate import Gate
from ..http import KeyCheck
from ..server import DrainingServer, ServerOptions, announce_server
from .front import Front
from .replica import Replica, manifest_digest


# Seconds between two questions of Ray for a replica's health: three that fail end it.
_HEALTH_PERIOD = 1.0
# Replicas that do not load before the server gives up.
_LOADS = 2
_QUIET: dict[str, Any] = {"logging_level": logging.WARNING, "namespace": "serve"}
_LOG = {"log_level": "WARNING", "enable_access_log": False}
# A resource of Ray's nodes; Ray sets NEURON_RT_VISIBLE_CORES by it.
_CORES = "neuron_cores"


def serve_replicas(
    options: ServerOptions, fewest: int, most: int, target: float | None, listening: socket.socket, *, joins: bool
) -> None:
    """Serve by replicas until SIGTERM or SIGINT, then until the last request has its answer, or the time for that is over.

    Between `fewest` and `most` replicas Ray follows the load: it adds one where each has more than `target` requests, running and
    waiting (None: as many as run at once). With `joins` the cluster is the one that RAY_ADDRESS names.
    """
    options = replace(options, artifact=options.artifact.absolute())  # Ray's processes have other working folders
    artifact = Artifact.open(options.artifact)
    slots, number = artifact.config.batch_size, str(fewest) if fewest == most else f"{fewest} to {most}"
    with ExitStack() as last:
        last.callback(ray.shutdown)
        ranks = artifact.config.tensor_parallel_size if artifact.target in CHIPS else 0
        if joins:
            ray.init(**_QUIET)
            share = replica_resources([node["Resources"] for node in ray.nodes() if node["Alive"]], most, ranks)
            last.callback(serve.delete, options.name)  # the cluster stays
        else:
            share = _start_cluster(artifact, most, ranks)
        numbers = {"max_ongoing_requests": slots, "ray_actor_options": share, **scaling(fewest, most, target or slots)}
        replicas = _start_replicas(options, numbers)
        gate = Gate(slots * most, options.max_queue, lambda: None)
        front = Front(replicas, gate, options.name)
        app = front if options.api_key is None else KeyCheck(front, options.api_key, lambda status: None)
        announce_server(options, artifact.config, listening, f"{number} replicas, each ")
        DrainingServer(app, gate, options.drain_timeout, front.stop).run(sockets=[listening])


def _start_cluster(artifact: Artifact, most: int, ranks: int) -> dict[str, Any]:
    """Start a cluster of this machine alone; return what each replica takes of it."""
    cpus, devices = usable_cores(), {}
    if ranks:
        cores = check_devices(artifact.target, artifact.manifest["target_data"]["lnc"], ranks, most)
        show_cores(cores)
        devices[_CORES] = len(cores)
    share = replica_resources([{"CPU": cpus, **devices}], most, ranks)
    ray.init("local", include_dashboard=False, num_cpus=cpus, resources=devices, **_QUIET)
    return share


def scaling(fewest: int, most: int, target: float) -> dict[str, Any]:
    if most == fewest:
        return {"num_replicas": most}
    bounds = {"min_replicas": fewest, "max_replicas": most}
    return {"autoscaling_config": bounds | {"target_ongoing_requests": target}}


def _start_replicas(options: ServerOptions, numbers: dict[str, Any]) -> DeploymentHandle[Any]:
    """Return Ray Serve's handle of the replicas, once all have loaded the artifact."""
    deployment = serve.deployment(
        Replica,
        name="Replica",
        health_check_period_s=_HEALTH_PERIOD,
        graceful_shutdown_timeout_s=options.drain_timeout,
        max_constructor_retry_count=_LOADS,
        logging_config=_LOG,
        **numbers,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=_LOG)
    bound = deployment.bind(replace(options, api_key=None), manifest_digest(options.artifact))
    try:
        return serve.run(bound, name=options.name, route_prefix=None)
    except RuntimeError as error:
        message = serve.status().applications[options.name].deployments["Replica"].message or str(error)
        raise RuntimeError(f"no replica starts: {message.strip().splitlines()[-1].strip()}") from error


def replica_resources(nodes: Sequence[Mapping[str, float]], replicas: int, ranks: int) -> dict[str, Any]:
    """Return what each replica takes of its machine: its share of cores, or OMP_NUM_THREADS, and a Neuron core for each rank."""
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = [int(node.get("CPU", 0)) for node in nodes]
    shares = range(max(cores, default=0), 0, -1) if threads is None else [int(threads)]
    share = next((each for each in shares if sum(count // each for count in cores) >= replicas), 0)
    devices = {_CORES: ranks} if ranks else {}
    if not share or (ranks and sum(int(node.get(_CORES, 0)) // ranks for node in nodes) < replicas):
        raise ValueError(
            f"{replicas} replicas need {threads or 1} cores{f' and {ranks} Neuron cores' if ranks else ''} each, and the machines "
            f"have {[{name: node.get(name, 0) for name in ('CPU', *devices)} for node in nodes]}; ask for fewer replicas"
        )
    return {"num_cpus": share, "resources": devices}
