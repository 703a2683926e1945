# SPDX-License-Identifier: Apache-2.0
"""TextModel: an artifact that takes text or messages and streams text. Where graphs do all that a text needs, it imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from ..artifact.artifact import Artifact
from ..artifact.find import find_artifact
from ..config import ExportOptions, refuse_unknown
from ..engine.plain_requests import CHOICES, PlainRequests, RequestMaker, read_plain_defaults
from ..engine.policy import SchedulerOptions
from ..errors import first_line
from ..runtime.lengths import most_new_tokens
from ..runtime.profile import Profile
from ..targets import RankOptions
from ..text.stream import TextAnswer
from ..text.template import Message
from ..text.tokenizer import open_tokenizer


if TYPE_CHECKING:
    from ..engine.service import EngineService
    from ..runtime.runner import GraphRunner

# The longest answer where neither a call nor the artifact says: it leaves room for others in the slot.
DEFAULT_NEW_TOKENS = 512


class TextModel:
    """An artifact with its tokenizer.

        with TextModel.from_pretrained("smollm2/") as model:
            for piece in model.answer([{"role": "user", "content": "What is a prefill?"}]):
                print(piece, end="")

    Several answers may be read at the same time: they share steps.

    Attributes:
        neuron_config: sizes and options of the graphs.
        runner: the slots and graphs, with counters.
        tokenizer: a `TextTokenizer`, or transformers' own where only that does the same.
    """

    def __init__(
        self, artifact: Artifact, runner: GraphRunner, tokenizer: Any, *, trust_remote_code: bool = False
    ) -> None:
        self.artifact = artifact
        self.neuron_config = artifact.config
        self.runner = runner
        self.tokenizer = tokenizer
        self._trust_remote_code = trust_remote_code
        self._defaults = read_plain_defaults(artifact)
        self._service: EngineService | None = None
        self._numbers = itertools.count()

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        *,
        trust_remote_code: bool = False,
        rank_python: str | Path | None = None,
        rank_timeout: float | None = None,
        profile: Profile | None = None,
        check_tokenizer: Callable[[Any], None] | None = None,
        **hub: Any,
    ) -> TextModel:
        """Load an artifact, a folder or a Hub id.

        Args:
            trust_remote_code: run a checkpoint's own code, and compiled graphs from the Hub as they are.
            rank_python, rank_timeout, profile: as in `NeuronModelForCausalLM.from_pretrained`.
            check_tokenizer: gets the tokenizer before the graphs are loaded, which may take long.
            hub: `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`.

        Raises:
            FileNotFoundError: `model_id` names no artifact.
            ArtifactError: the artifact is corrupt.
            ValueError: it has no tokenizer.
            TypeError: an option is unknown.
        """
        options = ExportOptions().hub
        refuse_unknown(hub, options)
        found = find_artifact(model_id, export=False, native_code=trust_remote_code, **options | hub)
        assert found is not None  # export=False raises instead
        artifact, from_hub = found
        artifact.verify_described()
        tokenizer: Any = open_tokenizer(artifact.path)
        if tokenizer is None:
            from ..checkpoints.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(artifact.path, str(artifact.path), trust_remote_code=trust_remote_code)
        if check_tokenizer is not None:
            check_tokenizer(tokenizer)
        from ..runtime.timing import load_runner

        runner = load_runner(
            artifact,
            trust_native_code=trust_remote_code or not from_hub,
            trust_remote_code=trust_remote_code,
            ranks=RankOptions(None if rank_python is None else str(rank_python), rank_timeout),
            profile=profile,
        )
        return cls(artifact, runner, tokenizer, trust_remote_code=trust_remote_code)

    def make_requests(self, asked: Mapping[str, Any] = MappingProxyType({})) -> RequestMaker:
        """Return a maker of requests that choose tokens by `asked`, keywords of `generate`; others are the artifact's.

        Raises ValueError if the artifact cannot do what they ask; TypeError if `generate` has no such keyword.
        """
        if self._defaults is None or not asked.keys() <= {*CHOICES}:
            return self._requests_by_transformers(asked)
        return PlainRequests(self.artifact, self._defaults, asked, lambda: self._requests_by_transformers(asked))

    def _requests_by_transformers(self, asked: Mapping[str, Any]) -> RequestMaker:
        from transformers import GenerationConfig

        from ..artifact.skeleton import read_config
        from ..engine.continuous_batching.requests import RequestFactory
        from ..runtime.defaults import Defaults
        from .saving import read_defaults

        refuse_unknown(asked, [name for name in vars(GenerationConfig()) if not name.startswith("_")])
        config = read_config(self.artifact.path, trust_remote_code=self._trust_remote_code)
        rules: Any = Defaults(config, read_defaults(self.artifact, config), self.neuron_config)
        rules.artifact, rules.own_tokenizer = self.artifact, lambda: self.tokenizer
        return RequestFactory(rules, GenerationConfig(**asked), None, cuts_text=True)

    def serve(
        self,
        options: SchedulerOptions | None = None,
        *,
        seed: int | None = None,
        step_timeout: float | None = None,
        warm_up: bool = True,
    ) -> EngineService:
        """Serve requests from any thread until the service is closed.

        `seed` seeds the requests that bring none; a step may take `step_timeout` seconds; `warm_up` runs each graph once before the first
        request. Raises ValueError if the artifact cannot do what the options ask; RuntimeError if another service runs.
        """
        from ..engine.engine import Engine
        from ..engine.service import EngineService

        if self._service is not None and self._service.stopped is None:
            raise RuntimeError(
                "the model's slots are in use by a running service; send the request to it, or close it"
            )
        engine = Engine(self.runner, options, vocab_size=self.artifact.model.vocab_size, seed=seed)
        if warm_up:
            self.runner.warm_up()
        self._service = EngineService(engine, step_timeout=step_timeout)
        return self._service

    def answer(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **asked: Any,
    ) -> TextAnswer:
        """Return the answer to a prompt; its text comes as a caller iterates over it.

        Args:
            prompt: a text that is continued, its token ids, or messages with `role` and `content` for the chat template.
            max_new_tokens: the longest answer; None: the artifact's own default, else as many as fit, at most 512.
            seed: makes sampling repeatable.
            asked: keywords of `generate` by which tokens are chosen, such as `temperature` with `do_sample=True`.

        Raises:
            ValueError: the prompt does not fit, there is no chat template or it refuses the messages, or the artifact cannot do what
                is asked.
        """
        if self._service is None or self._service.stopped is not None:
            self.serve(warm_up=False)
        assert self._service is not None
        requests, ids = self.make_requests(asked), self.encode_prompt(prompt)
        if max_new_tokens is None:
            room = max(1, most_new_tokens(len(ids), self.neuron_config))
            max_new_tokens = min(requests.new_tokens(len(ids)) or DEFAULT_NEW_TOKENS, room)
        request = requests.make_request(f"answer-{next(self._numbers)}", ids, max_new_tokens, seed=seed)
        stream = self._service.submit(request)
        return TextAnswer(stream, self.tokenizer, requests.stop_strings, prompt_tokens=len(ids))

    def encode_prompt(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt, and raise ValueError, as `answer` does."""
        if isinstance(prompt, str):
            prompt.encode()  # an argument or a line may hold bytes that are no UTF-8, which no tokenizer takes
            return list(self.tokenizer(prompt)["input_ids"])
        if len(prompt) and isinstance(prompt[0], Mapping):
            return encode_chat(self.tokenizer, cast("Sequence[Message]", prompt))
        return list(cast("Sequence[int]", prompt))

    def close(self) -> None:
        """End the answers under way, and the engine's thread."""
        if self._service is not None:
            self._service.close()

    def __enter__(self) -> TextModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation, with the beginning of an answer.

    Raises ValueError if the chat template refuses it, or a message has bytes that are no UTF-8.
    """
    for message in messages:
        str(message.get("content")).encode()
    try:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    except Exception as error:  # a template is a program
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} fails ({first_line(error)}); correct it, or give the prompt as a text "
            f"(--no-chat-template)"
        ) from error
    return ids
