"""The models that engines serve, and what every engine would therefore refuse: it is refused before any leg.

In the engines' words (vLLM 0.32): the name of a model that none serves, a conversation without a message, token ids
beyond the context. Only a tokenizer knows whether a text is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from pdserve.pd.errors import bad_request
from pdserve.pd.requests.body import Body, decode, encode
from pdserve.pd.requests.dialects import Dialect

SHOWN: Final = 256
"""Characters of a name that a client gives."""
_EMPTY_LIST_BYTES: Final = 16
_BEGINNING_BYTES: Final = 64
_MODEL: Final = ("model",)
_BLANKS: Final = b" \t\r\n"
_BYTES_OF_AN_ID: Final = 2
"""At least, with its comma."""
_LOOK_BYTES: Final = 16_777_216
_LONGEST_NAME: Final = 16_384
"""Bytes: megabytes are not read to see that no model is called so."""


class _Model:
    """Describes a model that is served."""

    __slots__ = ("limit", "name")

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.limit = limit


class ServedModels:
    """Knows which models are served. It is empty until the first engine has answered; until then nothing is refused."""

    __slots__ = ("_any", "_as_written", "_unknown", "names")

    def __init__(self, unknown: Callable[[str], None]) -> None:
        """Begin without a model. `unknown` is asked what becomes of a request for a model that is not served: it raises
        ApiError, or the request is passed on."""
        self._unknown = unknown
        self.names: dict[str, int | None] = {}
        """Name of a model -> the longest prompt that every worker takes, None when they do not report it."""
        self._as_written: dict[bytes, _Model] = {}
        """The same by the name as JSON."""
        self._any = _Model("", None)
        """What is known of a request that names none of them: the least limit, and the model where there is only one.
        """

    def merge(self, workers: Iterable[Mapping[str, int | None]]) -> None:
        """Merge all that workers serve, each with the context of each model."""
        names: dict[str, int | None] = {}
        for limits in workers:
            for name, limit in limits.items():
                known = names.get(name)
                names[name] = limit if known is None else known if limit is None else min(known, limit)
        self.names = names
        self._as_written = {encode(name): _Model(name, limit) for name, limit in names.items()}
        only = "" if len(names) != 1 else next(iter(names))
        self._any = _Model(only, min([limit for limit in names.values() if limit is not None], default=None))

    def check(self, dialect: Dialect, body: Body) -> str:
        """Return the model that a body means; empty: not known. Raises ApiError for what every engine would refuse."""
        model = self._any
        if "model" in body.members:
            written = _name(body)
            known = self._as_written.get(written)
            model = self._other(written) if known is None else known
        if not self.names:
            return model.name
        limit = model.limit
        listed = dialect.list_of_messages
        if listed is not None and 0 < body.length(listed) <= _EMPTY_LIST_BYTES and _is_empty_list(body, listed):
            raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
        if limit is not None and not dialect.single_prompt and "truncate_prompt_tokens" not in body.members:
            _check_ids(body, limit)
        return model.name

    def _other(self, written: bytes) -> _Model:
        """Return the model of a name that is not written as usual, or not known; `written`: as JSON."""
        # As vLLM: without a name it is the model that there is. What is no text at all is the engine's to refuse.
        name = str(decode(written)) if written.startswith(b'"') else ""
        if name and self.names and name not in self.names:
            self._unknown(name)
        return _Model(name, self.names.get(name, self._any.limit))


def _name(body: Body) -> bytes:
    """Return the model's name, as JSON. One that is too long for a name is cut, and so is the name of no model."""
    if body.length("model") <= _LONGEST_NAME:
        return body.beginning(_MODEL, _LONGEST_NAME)
    beginning = body.beginning(_MODEL, SHOWN).decode("utf-8", "replace")
    return encode(beginning[1:]) if beginning.startswith('"') else beginning.encode()


def _is_empty_list(body: Body, name: str) -> bool:
    return body.beginning((name,), _EMPTY_LIST_BYTES).translate(None, _BLANKS) == b"[]"


def _check_ids(body: Body, limit: int) -> None:
    """Refuse a prompt of more than `limit` token ids. Raises ApiError."""
    if body.length("prompt") <= limit * _BYTES_OF_AN_ID:
        return
    beginning = body.beginning(("prompt",), _BEGINNING_BYTES).translate(None, _BLANKS)
    if not (beginning[:1] == b"[" and beginning[1:2].isdigit()):
        return
    ids = body.count("prompt", b",", _LOOK_BYTES) + 1
    if ids > limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {ids} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={ids})",
            "input_tokens",
        )
