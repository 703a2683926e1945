# SPDX-License-Identifier: Apache-2.0
"""The model card of an artifact: metadata as the Hub reads it, and what a reader wants to know. No number in it is made up."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..config import HLO_TARGETS, NEURON_TARGETS
from ..inspect.facts import Facts
from ..inspect.units import bytes_text
from .markdown import block, code, table


LIBRARY = "optimum-neuron-runtime"
_TAGS = ("neuron", "optimum", "text-generation")
_MARK = "<!-- made by optimum-neuron-runtime from the artifact; sha256 of what stands above: "
_MARK_END = " -->\n"


def make_card(
    facts: Facts, *, repo_id: str | None = None, base_model: str | None = None, tags: Sequence[str] | None = None
) -> str:
    """A card as Markdown.

    Args:
        repo_id: where it will be; None of a folder.
        base_model: Hub id of the model that the checkpoint is; default: the repository that the export read.
        tags: beside those that follow from the artifact.

    Raises:
        ValueError: `base_model` is no name of a Hub repository.
    """
    if base_model is not None:
        try:
            validate_repo_id(base_model)
        except HFValidationError as error:
            raise ValueError(
                f"base_model={base_model!r} is no name of a Hub repository; name it as in org/name"
            ) from error
    name = repo_id or f"{facts.name}/"
    sections = [
        _metadata(facts, base_model, tags or ()),
        f"# {code(name.rpartition('/')[2] or facts.name)}\n",
        _what(facts, base_model),
        "## Load\n\n" + _load(name, facts),
        "## How it was compiled\n\n" + _compiled(facts),
        "## Sizes\n\n" + _sizes(facts),
        *(["## Quantization\n\n" + _quantization(facts)] if facts.quantized else []),
        "## Quality\n\n" + _quality(facts, name),
        "## Speed\n\n" + _speed(facts),
    ]
    return with_mark("\n".join(sections))


def with_mark(text: str) -> str:
    """A card with the line by which it is known to be unchanged."""
    return f"{text}\n{_MARK}{_digest(text)}{_MARK_END}"


def is_made(card: str) -> bool:
    """Whether a card was made here and not changed since: only such a one may be replaced unasked."""
    text, mark, rest = card.replace("\r\n", "\n").rpartition(_MARK)
    return bool(mark) and rest == _digest(text.removesuffix("\n")) + _MARK_END


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(facts: Facts, base_model: str | None, tags: Sequence[str]) -> str:
    base = base_model or facts.origin.get("repo")
    own = [facts.target, facts.options["dtype"], *(facts.quantized[:1] and [_quantization_name(facts)])]
    own += [f"{facts.options['activations']}-activations"] if facts.options["activations"] else []
    data: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "text-generation",
        **{name: facts.origin.get(name) for name in ("license", "license_name", "license_link", "language")},
        "base_model": base,
        "base_model_relation": "quantized" if base and facts.quantized else None,
        "tags": list(dict.fromkeys([*_TAGS, *own, *tags])),
    }
    return f"---\n{ModelCardData(**data).to_yaml()}\n---\n"


def _quantization_name(facts: Facts) -> str:
    named = facts.options["quantization"]
    return named if named and named != "checkpoint" else facts.quantized[0].kind


def _what(facts: Facts, base_model: str | None) -> str:
    base = base_model or facts.origin.get("repo")
    of = f"[{base}](https://huggingface.co/{base})" if base else code(facts.source)
    merged = f", with the adapters {', '.join(map(code, facts.adapters))} merged" if facts.adapters else ""
    options = facts.options
    cores = options["tensor_parallel_size"]
    on = f" on {cores} cores" if cores > 1 else ""
    return (
        f"{of}{merged}, {_how(facts.target)}{on} by {LIBRARY}: {len(facts.graphs)} graphs of fixed shapes for up to "
        f"{options['batch_size']:,} requests at a time, each of up to {options['sequence_length']:,} tokens.\n"
    )


def _how(target: str) -> str:
    if target in NEURON_TARGETS:
        return f"compiled ahead of time for AWS Neuron ({target})"
    if target in HLO_TARGETS:
        return "lowered ahead of time to HLO, as a Neuron compiler gets it and XLA runs it on a CPU,"
    return (
        "compiled ahead of time for any CPU" if target == "cpu" else "made ready for any CPU, without being compiled,"
    )


def _load(name: str, facts: Facts) -> str:
    if facts.target == "hlo" and facts.options["tensor_parallel_size"] > 1:
        return "It is made to be looked at: what the target hlo shares between cores is certified, and generates nothing.\n"
    shown = name.rstrip("/")
    lines = [
        "from transformers import AutoTokenizer",
        "from optimum_neuron import NeuronModelForCausalLM",
        "",
        f"model = NeuronModelForCausalLM.from_pretrained({json.dumps(shown)})",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(shown)})",
        'inputs = tokenizer("A prompt", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
    ]
    trust = (
        "From the Hub, its graphs are compiled again where it is loaded, unless `trust_remote_code=True` says that whoever made "
        "them is trusted.\n"
        if facts.sizes["graphs"]
        else ""
    )
    serve = block(_command("serve", shown), "bash")
    return f"{block(chr(10).join(lines), 'python')}\n{trust}\nServe it over OpenAI's API, from a folder:\n\n{serve}"


def _command(subcommand: str, name: str) -> str:
    folder = name.rpartition("/")[2]
    download = f"hf download {shlex.quote(name)} --local-dir {shlex.quote(folder)}\n" if "/" in name else ""
    return f"{download}optimum-cli neuron {subcommand} {shlex.quote(folder)}"


def _compiled(facts: Facts) -> str:
    versions = {**facts.exported_with, **facts.compiled_with}
    listed = ", ".join(f"{code(name)} {code(version)}" for name, version in versions.items())
    rows = [
        (code(each.name), each.shape or "-", f"{each.context:,}" if each.context else "-", _size(each.bytes))
        for each in facts.graphs
    ]
    graphs = table(("graph", "rows x tokens", "context", "size"), rows, numbers=2)
    return f"{block(facts.command, 'bash')}\nVersions: {listed}.\n\n{graphs}" + _certificate(facts)


def _certificate(facts: Facts) -> str:
    found = facts.certificate
    if found is None:
        return ""
    nearest = max(each.difference / each.bound if each.bound else each.difference for each in found.comparisons)
    return (
        f"\nThe graphs were executed by XLA on the exporting host beside the model, {found.layers} of {found.all_layers} layers, "
        f"{found.steps} steps: the largest difference is {nearest:.0%} of its bound for rounding.\n"
    )


def _sizes(facts: Facts) -> str:
    sizes, options = facts.sizes, facts.options
    cores = options["tensor_parallel_size"]
    rows = [("weights", _size(sizes["weights"])), ("graphs", _size(sizes["graphs"]))]
    rows += [("KV cache and state, all requests", _size(sizes["cache and state"]))]
    if sizes["snapshots"]:
        rows += [("snapshots of state", _size(sizes["snapshots"]))]
    rows += [("KV cache of a token", _size(sizes["cache per token"]))]
    if sizes["state per slot"]:
        rows += [("state of a request", _size(sizes["state per slot"]))]
    shared = f"\nWeights are those of {cores} cores together.\n" if cores > 1 else ""
    return table(("", "size"), rows, numbers=1) + shared


def _quantization(facts: Facts) -> str:
    plain = facts.options["dtype"]
    rows = [
        (
            each.kind,
            f"{each.weights:,}",
            f"{each.groups:,}",
            each.scale,
            "yes" if each.has_shift else "no",
            each.activations or plain,
        )
        for each in facts.quantized
    ]
    headers = ("codes", "weights", "scales per output", "of type", "zero points", "activations")
    return f"A{facts.rounding[1:]}.\n\n{table(headers, rows)}"


def _quality(facts: Facts, name: str) -> str:
    if not facts.quality:
        folder = name.rstrip("/").rpartition("/")[2]
        return f"Not measured. `python -m benchmark.quality` measures it, for an artifact with `--prompt-logits`: {code(folder)}.\n"
    rows = [
        (
            f"{each['perplexity']:.4f}",
            f"{each['reference_perplexity']:.4f}",
            *(f"{each[key]:.2e}" for key in ("kl_mean", "kl_p99", "kl_max")),
            f"{each['top1']:.2%}",
            f"{each['tokens']:,}",
        )
        for each in facts.quality
    ]
    first = facts.quality[0]
    headers = ("perplexity", "of the reference", "KL mean", "KL 99%", "KL max", "same top-1", "tokens")
    return (
        f"On {code(first['text'])}, beside {code(first['reference'])}; KL divergence in nats per token.\n\n"
        + table(headers, rows, numbers=len(headers))
    )


def _speed(facts: Facts) -> str:
    if not facts.speeds:
        return "Not measured.\n"
    rows = [
        (
            code(each["name"]),
            ", ".join(f"{key} {value}" for key, value in _conditions(each)) or "-",
            f"{each['value']:,.4g}",
            code(each["unit"]),
        )
        for each in facts.speeds
    ]
    machine = ", ".join(f"{code(key)} {code(value)}" for key, value in facts.machine.items() if value is not None)
    return table(("", "with", "value", "unit"), rows) + (f"\nOn {machine}.\n" if machine else "")


def _conditions(speed: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in speed.get("conditions", {}).items():
        yield code(key), code(value)


def _size(size: int) -> str:
    return bytes_text(size) if size else "-"
