# SPDX-License-Identifier: Apache-2.0
"""The Neuron targets: graphs in HLO, checked, compiled for the device, and run there or by XLA here."""
