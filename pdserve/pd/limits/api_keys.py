"""The API keys of clients, as they are looked up for each request. Where they come from: limits.keys."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from pdserve.pd.errors import ApiError

_BEARER: Final = b"bearer "


class ApiKey:
    """The record of a client's key. The key itself is nowhere."""

    __slots__ = ("digest", "limited", "max_requests", "name", "priority", "requests_per_minute")

    def __init__(
        self,
        name: str,
        digest: bytes,
        max_requests: int | None = None,
        requests_per_minute: int | None = None,
        priority: int = 0,
    ) -> None:
        self.name = name
        self.digest = digest
        self.max_requests = max_requests
        """In flight at once."""
        self.requests_per_minute = requests_per_minute
        self.priority = priority
        """The best priority that its requests can get, and the one that they have by default; the smaller the sooner.
        """
        self.limited = max_requests is not None or requests_per_minute is not None
        """There is something to count."""


_NO_KEY: Final = ApiKey("", bytes(32))


class Keys:
    """The keys of one version of the file.

    Looking one up takes the same steps whatever the key is and however many there are: its SHA-256 finds at most one
    entry, by Python's hash of it, whose secret is this process's own; that entry is compared in constant time. How long
    a lookup takes therefore says nothing about how much of a key is right, and no memory of verified keys is needed to
    be fast.
    """

    def __init__(self, keys: list[ApiKey]) -> None:
        self.names = tuple(key.name for key in keys)
        self._entries = {key.digest: key for key in keys}

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the key that this is, if it is one."""
        digest = sha256(presented).digest()
        entry = self._entries.get(digest, _NO_KEY)
        return entry if hmac.compare_digest(entry.digest, digest) and entry is not _NO_KEY else None

    def identify(self, authorization: bytes | None, x_api_key: bytes | None = None) -> ApiKey:
        """Return the key of a request, from `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`.
        ApiError 401 without a valid one."""
        if authorization is not None and authorization[:7].lower() == _BEARER:
            presented = authorization[7:].strip()
        elif x_api_key is not None:
            presented = x_api_key.strip()
        else:
            raise ApiError(401, "An API key is needed: send the header Authorization: Bearer KEY.")
        key = self.find(presented)
        if key is None:
            raise ApiError(401, "The API key is not valid.")
        return key
