# SPDX-License-Identifier: Apache-2.0
"""Values that options may have."""

from __future__ import annotations


TASKS = ("text-generation",)
NEURON_TARGETS = ("inf2", "trn1", "trn2", "trn3")
# Their graphs are lowered to HLO: hlo runs that on this CPU, the others compile it for the device.
HLO_TARGETS = ("hlo", *NEURON_TARGETS)
TARGETS = ("auto", "cpu", "eager", *HLO_TARGETS)
# Kernels of the SDK by name, and targets that run them: they need a Trainium 2 or later; on hlo their references run.
KERNELS = ("attention_cte", "attention_block_tkg", "moe_tkg")
KERNEL_TARGETS = ("auto", "hlo", "trn2", "trn3")
# Their compiler takes no e4m3 number as the Open Compute Project has it; error code EVRF051 of the SDK.
TARGETS_WITHOUT_FP8 = ("inf2", "trn1")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("int8", "fp8")
# Codes that activations are rounded to. "auto" takes the faster choice on this machine, "none" keeps activations as they are.
ACTIVATIONS = ("int8",)
ACTIVATION_CHOICES = ("auto", "none", *ACTIVATIONS)
# Codes that an export rounds weights to, or "checkpoint" for a quantized checkpoint's own.
QUANTIZATIONS = ("int8", "int4", "fp8", "checkpoint")
INT4_GROUP_SIZES = (32, 64, 128)
# Graphs count positions and tokens in int32.
LARGEST_SIZE = 2**31 - 1
# Attention kernels take this many columns at a time, and a block is a multiple of it.
SMALLEST_BLOCK = 64
# The most that servers of OpenAI's API return.
MOST_LOGPROBS = 20
