"""Chats by a folder's own template: the text, and the assistant's turns alone in the labels."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))
import chat
import tokens

CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.content }}>{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "three"},
]


class Letters:
    """A tokenizer of a folder, whose tokens are letters."""

    bos, eos, plain_chats = 1, 2, False

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.chat = folder, chat.chat_template_of(folder)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]


def folder(path: pathlib.Path, template: Any, *, own_file: bool = False) -> pathlib.Path:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    if own_file:
        (path / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def turns(row: dict[str, list[int]]) -> list[str]:
    """What is learnt, each run of labels for itself."""
    text = "".join("\0" if label == -100 else chr(label) for label in row["labels"])
    assert [a for a, b in zip(row["input_ids"], row["labels"], strict=True) if b != -100] == [
        ord(c) for c in text if c != "\0"
    ]
    return [part for part in text.split("\0") if part]


@pytest.mark.parametrize(
    "template, own_file, begins, learnt",
    (
        (CHATML, True, "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi", "{}<|im_end|>\n"),
        (HEADERS, False, "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "{}<|eot_id|>"),
        (
            [{"name": "tools", "template": "x"}, {"name": "default", "template": INSTRUCT}],
            False,
            "<s>[INST] hi",
            "{}</s>",
        ),
    ),
    ids=("chatml", "headers", "instruct"),
)
def test_the_assistants_turns_alone_are_learnt(
    template: Any, own_file: bool, begins: str, learnt: str, tmp_path: pathlib.Path
) -> None:
    tokenizer = Letters(folder(tmp_path, template, own_file=own_file))
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    (row,) = tokens.read_jsonl(file, tokenizer, 999)
    assert "".join(map(chr, row["input_ids"])).startswith(begins)
    assert turns(row) == [learnt.format("yo"), learnt.format("three")]
    asked = "".join(map(chr, tokens.question("why", row, tokenizer)))
    assert "why" in asked and asked == tokenizer.chat.render(
        [{"role": "user", "content": "why"}], answer=True
    )
    assert tokens.question(None, row, tokenizer) == row["input_ids"][: row["labels"].index(ord("y"))]
    (short,) = tokens.read_jsonl(file, tokenizer, 20)
    assert len(short["input_ids"]) == len(short["labels"]) == 20


@pytest.mark.parametrize(
    "template, messages, message",
    (
        (None, TALK, "has no chat template.*chat_template.jinja"),
        (INSTRUCT, TALK[1:], "line 1: the chat template refuses it: roles must take turns"),
        (FORGETS, TALK, "writes message 2 or those before it otherwise"),
        ("{{ messages[0].parts.text }}", TALK, "does not take these messages"),
        (CHATML, TALK[:1], 'no message has the role "assistant"'),
    ),
)
def test_what_cannot_be_told_is_refused(
    template: Any, messages: Any, message: str, tmp_path: pathlib.Path
) -> None:
    tokenizer = Letters(folder(tmp_path, template))
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(SystemExit, match=message):
        tokens.read_jsonl(file, tokenizer, 99)
