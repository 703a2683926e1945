# SPDX-License-Identifier: Apache-2.0
"""What a model needs on Neuron hardware and may reach there, from its config alone."""
