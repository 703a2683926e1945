# SPDX-License-Identifier: Apache-2.0
"""Checks lowered graphs against what the Neuron compiler and device take."""
