# SPDX-License-Identifier: Apache-2.0
"""A Neuron device made of host memory: what the fakes of all runtimes share."""
