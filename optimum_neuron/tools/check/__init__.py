# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron check`: acceptance of an artifact by the devices of a machine."""
