"""JSON in another encoding than UTF-8, as Python's own reader and so vLLM takes it: everything behind sees UTF-8."""

from __future__ import annotations

import codecs
import json

from pdserve.pd.errors import bad_request

ENCODED_BYTES = 524_288
"""Larger bodies must be UTF-8: to recode one takes time."""


def as_utf8(raw: bytes, *, whole: bool = True) -> bytes:
    """Return the body as UTF-8 without a byte order mark. `whole`: false for the first piece of a large body. Raises
    ApiError 400 when a text is not what its first bytes show, or would take long."""
    if raw.startswith(codecs.BOM_UTF8):
        return raw[len(codecs.BOM_UTF8) :]
    encoding = json.detect_encoding(raw[:4])
    if encoding == "utf-8":
        return raw
    if not whole:
        raise bad_request(f"A request body of more than {ENCODED_BYTES} bytes must be UTF-8.")
    try:
        return raw.decode(encoding).encode()
    except UnicodeError as error:
        raise bad_request(f"The request body is not valid JSON: it is no {encoding}: {error}.") from None
