# SPDX-License-Identifier: Apache-2.0
"""Fake neuron-ls: FAKE_NEURON_INSTANCE is like trn2.3xlarge:1, type and number of devices, or empty; FAKE_NEURON_CPUS are near all."""

import json
import os
import sys


CORES = {"inf2": 2, "trn1": 2, "trn2": 8, "trn3": 8}


def main() -> int:
    instance, _, count = os.environ.get("FAKE_NEURON_INSTANCE", "").partition(":")
    if sys.argv[1:] != ["-j"] or not instance:
        sys.stderr.write("neuron-ls: no neuron device found" + "\n")
        return 1
    physical = CORES[instance[:4]]
    lnc = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", 2 if physical > 2 else 1))
    cores = physical // lnc
    devices = [
        {
            "instance_type": instance,
            "neuron_device": index,
            "bdf": f"0000:{index:02}:00.0",
            "cpu_affinity": os.environ.get("FAKE_NEURON_CPUS", ""),
            "connected_to": None,
            "nc_count": cores,
            "logical_neuroncore_config": lnc,
            "memory_size": 103079215104,
            "neuroncore_ids": list(range(index * cores, (index + 1) * cores)),
            "neuron_processes": [],
        }
        for index in range(int(count or 1))
    ]
    sys.stdout.write(json.dumps(devices) + "\n")
    return 0


sys.exit(main())
