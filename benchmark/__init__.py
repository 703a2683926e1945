# SPDX-License-Identifier: Apache-2.0
"""Measurements of the runtime. Run from the root of the repository; each command explains itself with --help.

    python -m benchmark.peers                  other runtimes for a CPU, each in an environment of its own
    python -m benchmark.serving.stall          the engine: how long decoding pauses when a long prompt comes
    python -m benchmark.http.serve             servers, driven by vLLM's own client
    python -m benchmark.generate.first_use     the first request of a slot against later ones
    python -m benchmark.generate.formats       weights of int8 and int4 against plain ones, by instruction set
    python -m benchmark.recurrent              models with recurrences against transformers
    python -m benchmark.estimate               step times on Neuron by published runs, and their errors
    python -m benchmark.newcomer               the first steps of a user, from an empty folder to an answered request
    python -m benchmark.publish                what README, results and their pictures show of the runs in published/

No folder imports another. README.md says how to read the numbers.
"""
