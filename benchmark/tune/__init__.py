# SPDX-License-Identifier: Apache-2.0
"""What the tuner predicts for a trace on this CPU, beside what the engine then does."""
