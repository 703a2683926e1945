# SPDX-License-Identifier: Apache-2.0
"""Whether a model's step graphs compute what the model does; what cannot be vouched for is refused."""
