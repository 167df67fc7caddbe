"""Chats as a folder's own template writes them (Jinja, as transformers renders it), and what of them is learnt."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Messages = Sequence[Mapping[str, Any]]
FILE = "chat_template.jinja"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A folder's chat template.

    Args:
        source: its text.
        special: what it may name beside the messages, such as bos_token.
    """

    source: str
    special: Mapping[str, str]

    def render(self, messages: Messages, answer: bool = False) -> str:
        """The chat as text.

        Args:
            messages: dicts with "role" and "content".
            answer: whether to end where the assistant begins to speak.
        """
        template, broken = self._template
        given = {"messages": messages, "add_generation_prompt": answer, "tools": None, "documents": None}
        try:
            return str(template.render(**given, **self.special))
        except broken as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def learnt(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the spans of it that the assistant says, each with the end of its turn.

        Raises:
            ValueError: no message is the assistant's, or the template writes earlier messages otherwise once
                there are later ones, so that it cannot be told who says what.
        """
        text = self.render(messages)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, until = self.render(messages[:i], answer=True), self.render(messages[: i + 1])
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError(
                    f"the chat template writes message {i + 1} or those before it otherwise once later ones are "
                    'there, so that it cannot be told what the assistant says; give "prompt" and "completion" instead'
                )
            spans.append((len(before), len(until)))
        if not spans:
            raise ValueError('no message has the role "assistant", so there is nothing to learn')
        return text, spans

    @functools.cached_property
    def _template(self) -> tuple[Any, Any]:
        """The compiled template, and the kind of error that it raises."""
        try:
            import jinja2
            import jinja2.sandbox
        except ImportError as error:
            raise SystemExit("A chat template is Jinja: pip install 'zeroj[hf]' to render it.") from error

        def refuse(text: str) -> NoReturn:
            raise ValueError(f"the chat template refuses it: {text}")

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.source), jinja2.TemplateError


def chat_template_of(folder: pathlib.Path) -> ChatTemplate | None:
    """The template of a folder: a file of its own, or in tokenizer_config.json; None where it has none."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    source = config.get("chat_template")
    if (folder / FILE).is_file():
        source = (folder / FILE).read_text(encoding="utf-8")
    if isinstance(source, list):  # several by name
        source = {one["name"]: one["template"] for one in source}.get("default")
    if source is None:
        return None
    named = {name: config[name] for name in config if name.endswith("_token") and config[name] is not None}
    special = {name: x["content"] if isinstance(x, dict) else x for name, x in named.items()}
    return ChatTemplate(source, {name: x for name, x in special.items() if isinstance(x, str)})
