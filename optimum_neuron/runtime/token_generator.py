# SPDX-License-Identifier: Apache-2.0
"""Text as token ids: what follows a prompt, token by token. Imports neither torch nor transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..artifact.artifact import Artifact
from ..artifact.find import is_from_hub
from ..core import PromptPiece
from ..step.spec import SamplingParams
from ..targets import get_target
from .lengths import check_length
from .plain_defaults import DEFAULTS_NAME, PlainDefaults, read_plain_defaults
from .prefill import cut_pieces
from .refused import sampling_keywords
from .runner import GraphRunner
from .step_rows import StepRows, UniformStream
from .token_ids import check_token_ids


@dataclass
class _OneRequest:
    """A request in the first slot, as rows of steps need it."""

    sampling: SamplingParams
    uniforms: UniformStream | None
    slot: int = 0
    on_host: bool = False
    logprobs: bool = False


class TokenGenerator:
    """A loaded artifact that continues one prompt at a time.

    Attributes:
        artifact: the folder.
        runner: the graphs and slots.
        defaults: what the artifact's generation_config.json says.
    """

    def __init__(self, artifact: Artifact, runner: GraphRunner, defaults: PlainDefaults) -> None:
        self.artifact, self.runner, self.defaults = artifact, runner, defaults

    @classmethod
    def open(cls, path: str | Path) -> TokenGenerator:
        """Load an artifact's folder.

        Raises:
            ArtifactError: the artifact is corrupt.
            FileNotFoundError: there is no artifact.
            ValueError: its defaults ask for what only `NeuronModelForCausalLM` does.
        """
        artifact = Artifact.open(path)
        # Before any of these files is read; a target verifies its own.
        artifact.verify(name for name in artifact.manifest["files"] if name == DEFAULTS_NAME)
        defaults = read_plain_defaults(artifact)
        if defaults is None:
            raise ValueError(
                f"{artifact.path} has defaults of generation that the graphs do not follow by themselves; load it by "
                f"NeuronModelForCausalLM"
            )
        executable = get_target(artifact.target).load(
            artifact, trust_native_code=not is_from_hub(artifact.path), trust_remote_code=False
        )
        return cls(artifact, GraphRunner(executable, artifact.config, artifact.graphs, artifact.model), defaults)

    def stream_tokens(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield the tokens that follow a prompt, up to an end token, which is the last one.

        Texts that end an answer by `defaults.stop_strings` are for the caller, who has the tokenizer.

        Args:
            max_new_tokens: most tokens; None: as the defaults say, or as many as the cache holds.
            temperature, top_k, top_p, min_p: how tokens are chosen; None: as the defaults say.
            seed: makes drawn tokens repeatable.

        Raises:
            ValueError: the prompt or the number of tokens does not fit, or the model does not take a token id.
        """
        tokens, sizes, defaults = np.asarray(prompt), self.artifact.config, self.defaults
        check_token_ids(tokens, self.artifact.model.num_embeddings, "the prompt")
        if max_new_tokens is None:
            max_new_tokens = defaults.count_new_tokens(tokens.size, sizes)
        count = check_length(tokens.size, max_new_tokens, sizes, "the prompt")
        given = sampling_keywords(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sampling = defaults.choose_sampling(given)
        uniforms = UniformStream(np.random.SeedSequence(seed)) if sampling.temperature else None
        request, rows = _OneRequest(sampling, uniforms), StepRows[_OneRequest](self.runner)
        self.runner.reserve_slots([tokens.size + count - 1])
        rows.start_request(request, resets=False)
        began = time.perf_counter()
        piece = PromptPiece(0, tokens.astype(np.int32))
        for step in cut_pieces([piece], sizes.ctx_batch_size, sizes.prefill_chunk_size):
            chosen = rows.run_rows([], step)
        for number in range(count):
            if number:
                chosen = rows.run_rows([request], [])
            ((_, token),) = chosen
            assert isinstance(token, int)
            rows.feed_token(0, token)
            yield token
            late = defaults.max_time is not None and time.perf_counter() - began > defaults.max_time
            if token in defaults.eos_token_ids or late:
                return
