# SPDX-License-Identifier: Apache-2.0
"""What transformers calls continuous batching, over the engine: the surface of the model class. Decides nothing itself."""
