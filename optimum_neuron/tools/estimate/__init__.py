# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron estimate`: memory and speed of a model on Neuron hardware, from its config alone."""
