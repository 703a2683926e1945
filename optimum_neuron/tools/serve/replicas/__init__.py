# SPDX-License-Identifier: Apache-2.0
"""Several copies of a model at one address: Ray Serve runs and replaces them, and the front sends them requests."""
