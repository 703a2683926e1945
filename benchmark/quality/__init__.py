# SPDX-License-Identifier: Apache-2.0
"""How well an export predicts text, beside the model that it was made of."""
