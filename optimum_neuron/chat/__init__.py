# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron chat`: a conversation whose history stays in a slot of the cache.

`session.py` computes its turns and knows no terminal; `commands.py` has the /commands, `terminal.py` the lines that are read and shown.
"""
