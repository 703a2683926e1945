# SPDX-License-Identifier: Apache-2.0
"""Step graphs: fixed-shape modules around a stock transformers model. Knows nothing of files, devices or compilers."""
