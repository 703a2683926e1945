# SPDX-License-Identifier: Apache-2.0
"""Compiles HLO modules to NEFFs with what the Neuron SDK offers."""
