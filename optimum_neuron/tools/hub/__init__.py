# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron push` and `card`: artifacts in repositories of the Hub, and their model cards."""
