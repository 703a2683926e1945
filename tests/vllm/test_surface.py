# SPDX-License-Identifier: Apache-2.0
"""vLLM's own sources against what the plugin takes of them: names, signatures, abstract methods, and calls of workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from documents import DOCUMENTS, Command, all_commands, code_spans, commands
from surface import ROOT, Sources, Surface, installed, rpc_names
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from optimum_neuron.config import NeuronConfig
from optimum_neuron.tools.serve.protocol import Asked, read_chat, read_completion
from optimum_neuron.vllm.worker import REFUSED_CALLS, NeuronWorker


SCHEDULER, OUTPUTS, EXECUTOR = (
    f"vllm/v1/{name}.py" for name in ("core/sched/scheduler", "outputs", "executor/abstract")
)


@pytest.fixture(scope="module")
def vllm() -> Sources:
    return installed()


def test_the_installed_vllm_is_as_the_plugin_takes_it(vllm: Sources) -> None:
    assert Surface(vllm).problems() == []


def test_every_method_that_vllm_calls_of_a_worker_is_implemented_or_refused_with_a_reason(vllm: Sources) -> None:
    called = rpc_names(vllm)
    assert {"reset_encoder_cache", "sleep", "wake_up", "discard", "synchronize_device", "update_weights"} <= called
    for name in REFUSED_CALLS:
        with pytest.raises(ValueError, match=rf"^{name} is not supported: \S.*; \S|^{name} is not supported: \S"):
            getattr(NeuronWorker, name)(None)


@pytest.mark.parametrize(("kind", "read"), [("chat", read_chat), ("completion", read_completion)])
def test_the_engines_server_takes_each_member_of_vllms_requests_at_its_default(
    kind: str, read: Callable[..., Asked]
) -> None:
    said = {"prompt": "Hi"} if kind == "completion" else {"messages": [{"role": "user", "content": "Hi"}]}
    needed = {"model": "tiny"} | said
    request = CompletionRequest if kind == "completion" else ChatCompletionRequest
    sizes = SimpleNamespace(name="tiny", config=NeuronConfig(), vocab_size=300, num_embeddings=300)
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in request.model_fields.items()
        if name not in needed
    }
    assert len(defaults) > 40
    for name, value in defaults.items():
        read({**needed, name: value}, sizes)
    read({**needed, **defaults}, sizes)


@pytest.mark.parametrize(
    ("path", "old", "new", "problem"),
    [
        (OUTPUTS, "    @abstractmethod\n    def get_output(",
         "    @abstractmethod\n    def get_more(self):\n        pass\n\n    @abstractmethod\n    def get_output(",
         "_PendingOutput lacks the abstract method get_more"),
        (SCHEDULER, r"def _reserve_prefill_lookahead\(\s+self,", "def _reserve_prefill_lookahead(self, reason,",
         "SlotScheduler._reserve_prefill_lookahead does not take what vLLM gives it: num_new_tokens"),
        (SCHEDULER, "_inflight_prefill_reserved_blocks", "_reserved", "Scheduler has no _inflight_prefill_reserved_blocks"),
        (EXECUTOR, r'collective_rpc\("reset_mm_cache"\)', 'collective_rpc("paint_green")',
         "vLLM calls paint_green of its workers: implement it, or refuse it with a reason"),
        (OUTPUTS, "class LogprobsLists", "class Logprobs", "imports vllm.v1.outputs.LogprobsLists, which is not there"),
        (OUTPUTS, "prompt_logprobs_dict", "prompt_logprobs_of", "the argument prompt_logprobs_dict, which it does not take"),
        ("vllm/transformers_utils/config.py", "_CONFIG_REGISTRY", "_CONFIGS",
         "patches takes _CONFIG_REGISTRY of vllm.transformers_utils.config, which has none"),
        ("vllm/v1/request.py", r"\bskip_reading_prefix_cache\b", "reads", "Request has no skip_reading_prefix_cache"),
    ],
)  # fmt: skip
def test_what_another_version_of_vllm_changes_is_named(
    vllm: Sources, path: str, old: str, new: str, problem: str
) -> None:
    change: Callable[[str], str] = lambda text: re.sub(old if "\\" in old else re.escape(old), new, text)  # noqa: E731
    assert any(problem in each for each in Surface(vllm.changed(path, change)).problems())


def test_a_method_that_the_plugin_forgets_is_named(vllm: Sources) -> None:
    plugin = Sources.of_folder(ROOT, "optimum_neuron/vllm")
    forgetful = plugin.changed("optimum_neuron/vllm/worker.py", lambda text: text.replace("def sleep(", "def doze("))
    assert (
        "vLLM calls sleep of its workers: implement it, or refuse it with a reason"
        in Surface(vllm, forgetful).problems()
    )


def _calls() -> list[Command]:
    shown = [command for document in DOCUMENTS for command in all_commands(document)]
    named = [command for span in code_spans() if span.startswith("vllm serve ") for command in commands(span)]
    return [command for command in shown + named if command.words[:2] == ("vllm", "serve")]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("words", sorted({command.words[2:] for command in _calls()}), ids=" ".join)
def test_vllm_takes_what_the_documents_tell_to_type(words: tuple[str, ...], parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(list(words)).model_tag == words[0]
