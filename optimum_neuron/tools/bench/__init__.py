# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron bench`: how fast an artifact is on this machine, by the engine that serves it."""
