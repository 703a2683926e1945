# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of an artifact without transformers: the same tokens, texts and conversations as with it, or no record at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from characters import WORDS, byte_level
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

from optimum_neuron.artifact.artifact import ArtifactError
from optimum_neuron.text.tokenizer import RECORD_NAME, TextTokenizer, open_tokenizer, write_record


TEXTS = st.one_of(
    st.sampled_from([*WORDS, "<s> </s> <|x|>"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
)
MARKED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "marks": MARKED,
    "trims": "{% for m in messages %}\n  {% if m.role == 'user' %}\nQ: {{ m.content | trim }}\n  {% else %}\nA: {{ m.content.strip() }}\n"
    "  {% endif %}\n{% endfor %}\n{{ bos_token }}",
    "trains": "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "breaks": "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ more is defined }}",
    "tools": "{{ tools | tojson(indent=2) if tools else documents | tojson }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') }}",
}
TURNS = [
    {"role": "user", "content": " Größe? "},
    {"role": "assistant", "content": "日本 <b>&"},
    {"role": "user", "content": "b"},
]


def marked(template: Any = None, made: Any = PreTrainedTokenizerFast, **changes: Any) -> Any:
    """A tokenizer of bytes that begins each text with <s>; `changes` are those of its plain tokenizer."""
    plain = byte_level(330, "<s>", "</s>")
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if changes:
        plain.enable_truncation(**changes)
        plain.enable_padding()
    tokenizer = made(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def word_pieces() -> Any:
    plain = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, ".": 3}, unk_token="[UNK]"))
    plain.pre_tokenizer, plain.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=plain, clean_up_tokenization_spaces=True)


def save(tokenizer: Any, folder: Path) -> tuple[Any, TextTokenizer | None]:
    """Return the tokenizers of a folder that transformers wrote: transformers' and this package's."""
    tokenizer.save_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    write_record(theirs, folder)
    return theirs, open_tokenizer(folder)


@pytest.fixture(scope="module", params=["bytes", "llama", "truncated"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TextTokenizer]:
    if request.param == "llama":  # transformers builds its parts anew from the vocabulary
        pieces = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijé本", "▁a", "ab"]
        vocab = {piece: number for number, piece in enumerate(pieces)}
        made: Any = LlamaTokenizerFast(vocab=vocab, merges=[("▁", "a"), ("a", "b")])
    else:
        made = marked(**{"max_length": 4} if request.param == "truncated" else {})
    made.chat_template = {**TEMPLATES, "default": MARKED, "tool_use": TEMPLATES["tools"]}
    theirs, ours = save(made, tmp_path_factory.mktemp(request.param))
    assert ours is not None
    return theirs, ours


@given(text=TEXTS, special=st.booleans())
@examples(60)
def test_texts_have_the_tokens_of_transformers(both: tuple[Any, TextTokenizer], text: str, special: bool) -> None:
    theirs, ours = both
    ids = ours(text, add_special_tokens=special)["input_ids"]
    assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)


def test_threads_share_one_vocabulary(both: tuple[Any, TextTokenizer]) -> None:
    own, texts = both[1], [f"{number} {WORDS[number % len(WORDS)]}" for number in range(100)]
    alone = [own(text) for text in texts]
    copies = [copy.deepcopy(own) for _ in texts]
    assert {*map(id, copies)} == {id(own)}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each, text: each(text), copies, texts)) == alone


def test_names_of_tokens_are_those_of_transformers(both: tuple[Any, TextTokenizer]) -> None:
    theirs, ours = both
    assert ours.get_vocab() == theirs.get_vocab() and ours.special_tokens_map == theirs.special_tokens_map
    assert [ours.convert_ids_to_tokens(each) for each in range(5)] == theirs.convert_ids_to_tokens(list(range(5)))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_conversations_are_rendered_as_by_transformers(tmp_path: Path, name: str, count: int) -> None:
    theirs, ours = save(marked(TEMPLATES[name]), tmp_path)
    assert ours is not None
    for options in (
        {"add_generation_prompt": True},
        {"continue_final_message": True} if name != "tools" and (name != "breaks" or count < 3) else {},
        {"tools": [{"type": "function", "function": {"name": "f<"}}], "more": 1},
        {"documents": [{"title": "é", "text": ""}]},
    ):
        text = ours.apply_chat_template(TURNS[:count], tokenize=False, **options)
        assert text == theirs.apply_chat_template(TURNS[:count], tokenize=False, **options)
        ids = ours.apply_chat_template(TURNS[:count], **options)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_template_may_use_any_name(tmp_path: Path) -> None:
    theirs, ours = save(marked("{{ source }} {{ values }} {{ continues_last }}"), tmp_path)
    asked: dict[str, Any] = {"tokenize": False, "source": "a", "values": "b", "continues_last": "c"}
    assert ours is not None
    assert ours.apply_chat_template(TURNS, **asked) == theirs.apply_chat_template(TURNS, **asked) == "a b c"


def test_one_of_several_templates_is_for_tools(both: tuple[Any, TextTokenizer]) -> None:
    theirs, ours = both
    for tools in (None, [{"name": "f"}]):
        asked: dict[str, Any] = {"tools": tools, "tokenize": False}
        assert ours.apply_chat_template(TURNS, **asked) == theirs.apply_chat_template(TURNS, **asked)


@pytest.mark.parametrize(
    ("template", "messages", "options", "reason"),
    [
        (None, TURNS, {}, "no chat template"),
        (MARKED, [], {}, "empty"),
        (MARKED, TURNS, {"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
        ("{{ raise_exception('no system') }}", TURNS, {}, "no system"),
        ("{{ messages[0].content.__class__.__mro__ }}", TURNS, {}, "unsafe"),
        ("nothing", TURNS, {"continue_final_message": True}, "leaves out the message"),
        ("{% for", TURNS, {}, "expected"),
    ],
)
def test_a_conversation_without_text_says_why(
    tmp_path: Path, template: str | None, messages: Any, options: dict[str, Any], reason: str
) -> None:
    _, ours = save(marked(template), tmp_path)
    assert ours is not None
    with pytest.raises((ValueError, TemplateError), match=reason):
        ours.apply_chat_template(messages, **options)


def splitting() -> Any:
    tokenizer = marked()
    tokenizer.split_special_tokens = True
    return tokenizer


class OwnTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that decodes in its own way."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize(
    "make", [word_pieces, splitting, lambda: marked(made=OwnTokenizer)], ids=["cleans up", "splits", "own code"]
)
def test_what_only_transformers_does_has_no_record(tmp_path: Path, make: Callable[[], Any]) -> None:
    write_record(make(), tmp_path)
    assert open_tokenizer(tmp_path) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../tokenizer.json"}, {"chat_template": 3}, {"chat_template": {"default": 3}}, {"special_tokens": []},
        {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_another_form_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save(marked(), tmp_path)
    path = tmp_path / RECORD_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match="export the model again"):
        open_tokenizer(tmp_path)
