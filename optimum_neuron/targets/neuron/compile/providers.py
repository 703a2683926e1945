# SPDX-License-Identifier: Apache-2.0
"""Which compiler compiles for a target on this machine."""

from __future__ import annotations

from .compiler import Provider
from .neuron_cc import NeuronCC, missing_compiler
from .nxd import NeuronxDistributed


# By target, the preferred one first. For Inferentia2 and Trainium1 the packages that run graphs also compile them; where only
# the command is here, its NEFF runs there as well.
_PREFERRED: dict[str, tuple[Provider, ...]] = {
    "inf2": (NeuronxDistributed(), NeuronCC()),
    "trn1": (NeuronxDistributed(), NeuronCC()),
    "trn2": (NeuronCC(), NeuronxDistributed()),
    "trn3": (NeuronCC(),),
}


def choose_provider(target: str) -> Provider:
    """The provider that compiles for a target here.

    Raises:
        RuntimeError: this machine has none; the message says what is missing.
    """
    for provider in _PREFERRED[target]:
        if provider.unavailable() is None:
            return provider
    # The command alone would do, for every target.
    raise RuntimeError(
        f"compiling for {target} needs the Neuron compiler, on x86 Linux with or without a device: {missing_compiler()}; "
        f"or export with target='cpu', which runs on this machine"
    )
