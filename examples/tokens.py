"""Text to token ids for fine-tuning: a tokenizer from a folder, or bytes; plain text, prompts and chats.

A line of the JSONL file is one of

    {"text": "..."}                                          every token is learnt
    {"prompt": "...", "completion": "..."}                   the completion alone is learnt
    {"messages": [{"role": "user", "content": "..."}, ...]}  what the assistant says is learnt

A chat is written by the folder's own chat template, or for bytes as ``<|role|>`` and a line for each message.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from chat import chat_template_of

IGNORED = -100


class Bytes:
    """Every byte is a token; 256 begins a text and 257 ends it. For models without a tokenizer."""

    vocab_size, bos, eos = 258, 256, 257
    pad_token_id = 0
    plain_chats, chat = True, None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Nothing to save: bytes are bytes."""


class FromFolder:
    """The tokenizer.json of a Hugging Face folder, by the package tokenizers (the extra "hf")."""

    def __init__(self, folder: pathlib.Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise SystemExit(f"{folder} has a tokenizer.json: pip install 'zeroj[hf]' to read it.") from error
        self.folder = folder
        self.inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        self.bos, self.eos = (_first(config.get(name)) for name in ("bos_token_id", "eos_token_id"))
        pad = _first(config.get("pad_token_id"))
        self.pad_token_id = pad if pad is not None else self.eos or 0
        self.vocab_size = self.inner.get_vocab_size()
        self.chat = chat_template_of(folder)

    plain_chats = False

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, and where in the text each of them stands."""
        found = self.inner.encode(text, add_special_tokens=False)
        return list(found.ids), list(found.offsets)

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids))

    def save_pretrained(self, folder: str) -> None:
        """Copies the tokenizer's files."""
        for path in [*self.folder.glob("*token*.json"), *self.folder.glob("chat_template*")]:
            (pathlib.Path(folder) / path.name).write_bytes(path.read_bytes())


def tokenizer_of(folder: pathlib.Path) -> Bytes | FromFolder:
    """The folder's tokenizer, or bytes where it has none."""
    return FromFolder(folder) if (folder / "tokenizer.json").is_file() else Bytes()


def read_jsonl(file: pathlib.Path, tokenizer: Any, longest: int) -> list[dict[str, list[int]]]:
    """Examples with "input_ids" and "labels", cut off at ``longest`` tokens.

    Raises:
        SystemExit: a line is not one of the forms above; names it.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(example(json.loads(line), tokenizer, longest))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file}, line {number}: {error}") from error
    return found


def example(line: Any, tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """One line as token ids and labels."""
    if isinstance(line, dict) and "messages" in line and not tokenizer.plain_chats:
        return encode_chat(line["messages"], tokenizer, longest)
    return encode(list(parts(line)), tokenizer, longest)


def encode_chat(messages: Any, tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """A chat by the tokenizer's template; what the assistant does not say is IGNORED in the labels.

    Raises:
        ValueError: the folder has no template, or it does not take these messages.
    """
    if tokenizer.chat is None:
        raise ValueError(
            f'{tokenizer.folder} has no chat template, which "messages" need: put one into chat_template.jinja or '
            'tokenizer_config.json (a base model has none; its "-Instruct" kin has), or give "prompt" and "completion"'
        )
    text, spans = tokenizer.chat.learnt(messages)
    ids, places = tokenizer.encode_spans(text)
    says = [any(a <= start < b for a, b in spans) for start, _ in places]
    labels = [token if learnt else IGNORED for token, learnt in zip(ids, says, strict=True)]
    return {"input_ids": ids[:longest], "labels": labels[:longest]}


def parts(line: Any) -> Iterator[tuple[str, bool]]:
    """(text, whether it is learnt) of one line."""
    if not isinstance(line, dict):
        raise ValueError("a line must be a JSON object")
    if "text" in line:
        yield line["text"], True
    elif "prompt" in line and "completion" in line:
        yield line["prompt"], False
        yield line["completion"], True
    elif "messages" in line:
        for message in line["messages"]:
            yield f"<|{message['role']}|>\n", False
            yield f"{message['content']}\n", message["role"] == "assistant"
    else:
        raise ValueError(f'needs "text", "prompt" and "completion", or "messages"; it has {sorted(line)}')


def encode(pieces: list[tuple[str, bool]], tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """Token ids and labels; what is not learnt is IGNORED in the labels."""
    ids = [tokenizer.bos] if tokenizer.bos is not None else []
    labels = [IGNORED] * len(ids)
    for text, learnt in pieces:
        new = tokenizer.encode(text)
        ids += new
        labels += new if learnt else [IGNORED] * len(new)
    if tokenizer.eos is not None:
        ids.append(tokenizer.eos)
        labels.append(tokenizer.eos if pieces[-1][1] else IGNORED)
    return {"input_ids": ids[:longest], "labels": labels[:longest]}


def question(prompt: str | None, row: dict[str, list[int]], tokenizer: Any) -> list[int]:
    """What to continue: a prompt, as a chat where the tokenizer has a template; or a row up to what is learnt of it."""
    if prompt is not None and tokenizer.chat is not None:
        chat = [{"role": "user", "content": prompt}]
        return list(tokenizer.encode_spans(tokenizer.chat.render(chat, answer=True))[0])
    if prompt is not None:
        return ([tokenizer.bos] if tokenizer.bos is not None else []) + tokenizer.encode(prompt)
    ids, labels = row["input_ids"], row["labels"]
    asked = next((i for i, label in enumerate(labels) if label != IGNORED), 0)
    return ids[:asked] if asked > 1 else ids[: len(ids) // 2 + 1]


def _first(value: Any) -> int | None:
    return value[0] if isinstance(value, list) else value
