# SPDX-License-Identifier: Apache-2.0
"""Execution of compiled graphs on Neuron devices, or of lowered ones by XLA on the CPU."""
