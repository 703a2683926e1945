# SPDX-License-Identifier: Apache-2.0
"""The times of steps on Neuron devices, as published and as estimated."""
