"""Text to token ids for fine-tuning: a tokenizer from a folder, or bytes; plain text, prompts and chats.

A line of the JSONL file is one of

    {"text": "..."}                                          every token is learnt
    {"prompt": "...", "completion": "..."}                   the completion alone is learnt
    {"messages": [{"role": "user", "content": "..."}, ...]}  what the assistant says is learnt
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

IGNORED = -100


class Bytes:
    """Every byte is a token; 256 begins a text and 257 ends it. For models without a tokenizer."""

    vocab_size, bos, eos = 258, 256, 257
    pad_token_id = 0

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

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.inner.decode(ids))

    def save_pretrained(self, folder: str) -> None:
        """Copies the tokenizer's files."""
        for path in self.folder.glob("*token*.json"):
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
            pieces = list(parts(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file}, line {number}: {error}") from error
        found.append(encode(pieces, tokenizer, longest))
    return found


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


def _first(value: Any) -> int | None:
    return value[0] if isinstance(value, list) else value
