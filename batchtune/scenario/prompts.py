"""Makes the requests to an OpenAI-compatible server: prompts of so many tokens, or those of a file, encoded
once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.payloads import RequestSet, draw_lengths, rotation
from batchtune.scenario.places import json_lines
from batchtune.scenario.spec.workload import FileInputs, LengthsSpec, MixSpec, OpenAiSpec, RequestSpec

UNIQUE_MARK: Final = b"0123prefix456789"
"""Bytes in a body that a client replaces, in each request, by digits of its own, as many as these."""

_WORDS: Final = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at",
    "be", "this", "from", "have", "or", "by", "had", "not", "but", "what", "all", "were", "when", "we", "there", "can",
    "an", "your", "which", "their", "said", "if", "do", "will", "about", "how", "up", "out", "them", "then", "she",
    "many", "some", "so", "these", "would", "other", "into", "has", "more", "her", "two", "like", "him", "see", "time",
    "could", "no", "make", "than", "first", "been", "its", "who", "now", "people", "my", "made", "over", "did", "down",
    "only", "way", "find", "use", "may", "water", "long", "little", "very", "after", "words", "called", "just", "where",
)  # fmt: skip


_Content: TypeAlias = str | list[dict[str, Any]]
_Prompt: TypeAlias = tuple[_Content, int | None]
"""(a text or the messages of a chat, its max_tokens, None: drawn)."""


def build_prompts(
    request: RequestSpec, *, model_name: str, seed: int = 1, distinct: int | None = None
) -> RequestSet:
    """Encode the prompts of a scenario as requests. One seed always gives the same bytes; a client replaces the
    UNIQUE_MARK in them, if any, by a text that differs in each request.

    `distinct`: number of different prompts; None: `request.distinct`.

    Raises:
        UsageError: `request.openai.tokenizer` cannot be used, or chat messages are given to api:
            completions.
        ScenarioError: a file that cannot be read.
    """
    import orjson

    kinds, named = [], _asked(request).model or model_name
    for number, kind in enumerate(request.kinds()):
        rng = np.random.default_rng([seed, number])
        made = list(_prompts(request, kind, rng, distinct or request.distinct))
        lengths = draw_lengths(_asked(request).output, len(made), rng).tolist()
        kinds.append(
            [
                orjson.dumps(_document(request, prompt, tokens, named))
                for prompt, tokens in zip(made, lengths, strict=True)
            ]
        )
    bodies = tuple(body for kind in kinds for body in kind)
    api = _asked(request).api
    return RequestSet(
        protocol=request.protocol,
        model_name=model_name,
        bodies=bodies,
        rows=(1,) * len(bodies),
        order=rotation([kind.weight for kind in request.kinds()], [len(kind) for kind in kinds], seed),
        timeout_s=request.timeout_s,
        headers=tuple(request.headers.items()),
        path=_asked(request).path or f"/v1/{'chat/completions' if api == 'chat' else api}",
    )


def check_prompts(request: RequestSpec) -> None:
    """Check the files of prompts, before anything is measured.

    Raises:
        ScenarioError: one cannot be read.
    """
    for kind in request.kinds() if request.protocol == "openai" else ():
        if isinstance(kind.inputs, FileInputs):
            list(_from_file(Path(kind.inputs.file)))


def _asked(request: RequestSpec) -> OpenAiSpec:
    return request.openai or OpenAiSpec()


def _document(request: RequestSpec, prompt: _Prompt, output_tokens: int, model_name: str) -> dict[str, Any]:
    asked, (content, own_tokens) = _asked(request), prompt
    if asked.prefix == "unique":
        content = _marked(content)
    if asked.api == "embeddings":
        return {"model": model_name, "input": content, **asked.body}
    if asked.api == "chat":
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        text: dict[str, Any] = {"messages": messages}
    elif isinstance(content, str):
        text = {"prompt": content}
    else:
        raise UsageError("request.inputs: messages are for api: chat", hint="set request.openai.api to chat")
    return {
        "model": model_name,
        **text,
        "max_tokens": own_tokens or output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if asked.ignore_eos else {}),
        **asked.body,
    }


def _marked(content: _Content) -> _Content:
    """Return the content with UNIQUE_MARK at its beginning; of messages, at that of the user's first one, so that a
    system prompt that they share stays the same."""
    mark = UNIQUE_MARK.decode()
    if isinstance(content, str):
        return f"{mark} {content}"
    texts = [at for at, message in enumerate(content) if _text_of(message) is not None]
    of_users = [at for at in texts if content[at].get("role") == "user"]
    marked = [*content]
    for at in (of_users or texts)[:1]:
        own = content[at]["content"]
        if isinstance(own, str):
            marked[at] = {**content[at], "content": f"{mark} {own}"}
        else:
            marked[at] = {**content[at], "content": [{"type": "text", "text": mark}, *own]}
    return marked


def _text_of(message: dict[str, Any]) -> str | list[Any] | None:
    """Return what a message says, a text or its parts; None: nothing, as where it calls a tool."""
    content = message.get("content")
    return content if content and isinstance(content, str | list) else None


def _prompts(
    request: RequestSpec, kind: MixSpec, rng: np.random.Generator, distinct: int
) -> Iterator[_Prompt]:
    if isinstance(kind.inputs, FileInputs):
        yield from _from_file(Path(kind.inputs.file))
        return
    cut = _cutter(_asked(request).tokenizer)
    own = 8 if _asked(request).prefix == "unique" else 0  # about what 16 digits of the mark cost
    for tokens in draw_lengths(kind.lengths or LengthsSpec(constant=128), distinct, rng).tolist():
        count = max(tokens - own, 1)
        yield cut(" ".join(rng.choice(_WORDS, count)), count), None


def _cutter(tokenizer_file: str | None) -> Callable[[str, int], str]:
    """Return a function that cuts a text of at least `count` words to `count` tokens; without a tokenizer it
    leaves the text as it is.

    Raises:
        UsageError: the package is missing, or the file has no tokenizer.
    """
    if tokenizer_file is None:
        return lambda text, _count: text
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(tokenizer_file)
    except ImportError as error:
        raise UsageError(
            "request.openai.tokenizer: the package tokenizers is not installed",
            hint="pip install tokenizers, or leave tokenizer out: prompts are then about as long",
        ) from error
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(f"request.openai.tokenizer: {tokenizer_file} has no tokenizer: {error}") from error

    def cut(text: str, count: int) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return str(tokenizer.decode(ids[:count]))

    return cut


def _from_file(path: Path) -> Iterator[_Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"request.inputs.file: {path} cannot be read: {error}") from error
    known = ("prompt", "messages", "max_tokens")  # keys of a line of a .jsonl file
    names = ("id", "custom_id", "metadata")  # by which files keep their lines apart
    texts = list(filter(str.strip, lines))
    if not texts:
        raise ScenarioError(f"request.inputs.file: {path} has no prompt")
    if path.suffix != ".jsonl":
        yield from ((text, None) for text in texts)
        return
    for number, _, document in json_lines(path):
        given = document if isinstance(document, dict) else {}
        text, messages = given.get("prompt"), given.get("messages")
        is_chat = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        content = messages if is_chat else None if messages else text
        if not content or (content is text and not isinstance(text, str)):
            raise ScenarioError(f'{path}:{number}: expected {{"prompt": "…"}} or {{"messages": […]}}')
        unknown = sorted(given.keys() - {*known, *names})
        if unknown:
            raise ScenarioError(
                f"{path}:{number}: unknown key {unknown[0]!r}; known: {', '.join(known)}",
                hint="keys of every request are set in request.openai.body",
            )
        for message in content if isinstance(content, list) else ():
            if _text_of(message) is None and not message.get("tool_calls"):
                raise ScenarioError(f"{path}:{number}: a message without content: {json.dumps(message)[:80]}")
        most = given.get("max_tokens")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ScenarioError(f"{path}:{number}: expected max_tokens above 0; was {most!r}")
        yield content, most
