"""API keys of clients: a file of hashes with what each key may do, read again when it changes. And the admin's token.

One JSON object a line; empty lines and lines that begin with # are skipped:

    {"name": "team-a", "sha256": "9f86d081...", "max_requests": 8, "requests_per_minute": 60, "priority": 0}

`name` and `sha256` are required; a limit that is missing does not exist. `sha256` is that of the whole
key as the client sends it. A plain hash is enough because keys are random, 256 bits of `pdserve new-key`: there is
nothing to guess from it.
"""

from __future__ import annotations

import json
import logging
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.errors import RecipeError
from pdserve.pd.file_reads import read_regular
from pdserve.pd.limits.api_keys import ApiKey, Keys

log = logging.getLogger("pdserve.proxy")

PREFIX = "pds-"
OWN_NAME = "@pdserve"
"""In metrics and logs; no key of the file can be called so."""
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_MIN_TOKEN = 16


class KeyLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}$")]
    max_requests: _Positive | None = None
    requests_per_minute: _Positive | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0


class KeyFile:
    """The file of keys and the keys that count now.

    A new version that cannot be used is reported in the log and in `failed`, and the old one stays in force.
    """

    def __init__(self, path: Path, own: str | None = None) -> None:
        """Read the file of keys. `own`: the deployment's engine key, by which its launcher and `verify` ask through the
        proxy. Who has it may ask the engines anyway. Raises RecipeError when the file cannot be used: there is no old
        version yet."""
        self.path = path
        self._own = [] if own is None else [ApiKey(OWN_NAME, sha256(own.encode()).digest())]
        self.failed = 0
        """Versions that could not be used."""
        self._seen = self._version()
        self.current = self._read()

    def reload(self) -> str:
        """Read the file now (SIGHUP, the admin's order). What cannot be used changes nothing; the answer has why.

        This and `reload_if_changed` may wait for the file system, and are called beside the event loop (file_reads)."""
        self._seen = self._version()
        try:
            fresh = self._read()
        except RecipeError as error:
            self.failed += 1
            log.error("the API keys stay as they were: %s: %s", error.where, error.what)
            return f"not usable, the old ones stay in force: {error.what}"
        log.info("%d API keys from %s", len(fresh.names) - len(self._own), self.path)
        self.current = fresh
        return "ok"

    def reload_if_changed(self) -> None:
        """Read the file again if it has changed. This is cheap enough to be called every second."""
        if self._version() != self._seen:
            self.reload()

    def _read(self) -> Keys:
        return Keys([*read(self.path), *self._own])

    def _version(self) -> tuple[int, int, int] | None:
        try:
            info = self.path.stat()
        except OSError:
            return None
        return info.st_mtime_ns, info.st_size, info.st_ino


def read(path: Path) -> list[ApiKey]:
    """Return the keys in a file. RecipeError with the line of the first thing that is wrong."""
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"the API keys cannot be read: {what}", where=str(path)) from error
    keys: list[ApiKey] = []
    names: set[str] = set()
    digests: set[bytes] = set()
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        where = f"{path}:{number}"
        try:
            line = msgspec.json.decode(text, type=KeyLine)
        except msgspec.MsgspecError as error:
            raise RecipeError(f"not an API key: {error}", where=where) from error
        key = _api_key(line)
        if key.name in names:
            raise RecipeError(f"there are two keys of the name {key.name}", where=where)
        if key.digest in digests:
            raise RecipeError(f"{key.name} has the same hash as another key", where=where)
        names.add(key.name)
        digests.add(key.digest)
        keys.append(key)
    if not keys:
        raise RecipeError("there is no API key in the file: no client could use the model", where=str(path))
    return keys


def read_token(path: Path) -> str:
    """Return the token in a file. Raises RecipeError when the file has none that could protect anything."""
    try:
        token = read_regular(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"the admin token cannot be read: {what}", where=str(path)) from error
    if len(token) < _MIN_TOKEN:
        raise RecipeError(f"the admin token has fewer than {_MIN_TOKEN} characters", where=str(path))
    return token


def new_key(name: str, **limits: int | None) -> tuple[str, str]:
    """Make a new key, and its line for the file. Raises RecipeError when the name or a limit is not possible."""
    key = PREFIX + secrets.token_urlsafe(32)
    fields = {"name": name, "sha256": sha256(key.encode()).hexdigest(), **limits}
    line = {field: value for field, value in fields.items() if value is not None}
    try:
        msgspec.convert(line, KeyLine)
    except msgspec.MsgspecError as error:
        raise RecipeError(f"not an API key: {error}") from error
    return key, json.dumps(line)


def _api_key(line: KeyLine) -> ApiKey:
    return ApiKey(
        name=line.name,
        digest=bytes.fromhex(line.sha256),
        max_requests=line.max_requests,
        requests_per_minute=line.requests_per_minute,
        priority=line.priority,
    )
