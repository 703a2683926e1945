# SPDX-License-Identifier: Apache-2.0
"""The Neuron targets: step graphs lowered to HLO, checked, compiled for the device, and run there or by XLA here."""
