# SPDX-License-Identifier: Apache-2.0
"""What is known of the AWS Neuron SDK and its hardware: packages, devices, chips, flags, error codes."""
