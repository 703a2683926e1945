# SPDX-License-Identifier: Apache-2.0
"""The scheduler on a simulated clock: what to export for a number of users on AWS Neuron. Needs no torch."""
