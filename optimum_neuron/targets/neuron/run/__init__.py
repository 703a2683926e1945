# SPDX-License-Identifier: Apache-2.0
"""Runs compiled graphs on Neuron devices, or lowered ones by XLA on the CPU."""
