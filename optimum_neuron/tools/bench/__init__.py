# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron bench`: the speed of an artifact on this machine, by the engine that serves it."""
