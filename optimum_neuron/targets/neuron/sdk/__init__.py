# SPDX-License-Identifier: Apache-2.0
"""Facts of the AWS Neuron SDK and its hardware: packages, devices, chips, flags, error codes."""
