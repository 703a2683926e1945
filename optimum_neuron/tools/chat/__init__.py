# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron chat`: session.py computes turns and knows no terminal; loop.py reads lines and shows answers."""
