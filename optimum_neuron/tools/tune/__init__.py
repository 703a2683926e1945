# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron tune`: sizes to export for a trace of requests, found by simulating the engine's own scheduler."""
