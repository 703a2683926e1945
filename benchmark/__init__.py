# SPDX-License-Identifier: Apache-2.0
"""Measurements of the runtime. Run from the root of the repository.

    python -m benchmark.generate               generate() against transformers
    python -m benchmark.generate.decode        a decode step, by live rows, context and block size
    python -m benchmark.generate.first_use     the first request of a slot against later ones
    python -m benchmark.generate.formats       weights of int8 and int4 against plain ones, by instruction set
    python -m benchmark.generate.host          what generate() and the engine take beside the graph of a step
    python -m benchmark.recurrent              models with recurrences against transformers, and their states' share of a step
    python -m benchmark.peers                  other runtimes for a CPU, each in an environment of its own
    python -m benchmark.quality                perplexity and KL divergence of exports beside the float32 model
    python -m benchmark.quality.harness        lm-evaluation-harness on an artifact
    python -m benchmark.serving.stall          the engine: how long decoding pauses when a long prompt comes
    python -m benchmark.serving.blocks         engine and vLLM: blocks against slots of the same memory
    python -m benchmark.http.serve             servers, driven by vLLM's own client
    python -m benchmark.vllm.overhead          where the time of vLLM's steps goes
    python -m benchmark.kernels.dense          the cpu target's kernels against torch's operators
    python -m benchmark.kernels.experts        its kernel of experts against transformers' grouped_mm
    python -m benchmark.kernels.quantized      its kernels of quantized weights against those of plain ones
    python -m benchmark.kernels.sample         its kernel of sampling against transformers' warpers
    python -m benchmark.export_memory          an export under a limit of memory that the kernel keeps
    python -m benchmark.newcomer               the first steps of a user, from an empty folder to an answered request
    python -m benchmark.estimate               step times on Neuron by published runs, and their errors
    python -m benchmark.tune                   what the tuner predicts for a trace on this CPU, beside what is then served
    python -m benchmark.publish                what README, results and their pictures show of the runs in published/

Each explains itself with --help. What they share is in this folder; no folder below it imports another. README.md says how to
read the numbers.
"""
