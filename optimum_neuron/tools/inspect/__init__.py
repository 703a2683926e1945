# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron inspect`: the facts of an artifact as data, tables and a page. Nothing of it is loaded or run."""
