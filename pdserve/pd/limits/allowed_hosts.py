"""Check the names that clients use for a proxy that asks for no key.

Whoever reaches loopback is trusted, and a web page that a user of this machine has opened reaches loopback too: by a
form or a script (its `Origin` is then another host), or by a name of its own that points to 127.0.0.1 (its `Host`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.errors import ApiError

ANY: Final = "*"
_NAME: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^:/@\s\[\]]+)(?::[0-9]*)?")
_ORIGIN: Final = re.compile(rb"[a-z][a-z0-9+.-]*://(\S+)", re.I)
_REMEMBERED: Final = 1024
_REFUSED: Final = (
    "This proxy has no API keys and answers only its own machine, and the {shown}. Add the name to "
    "proxy.allowed_hosts, or give the proxy keys (proxy.auth.keys_file)."
)


class AllowedHosts:
    """Allows loopback, the names given, and nothing else."""

    def __init__(self, names: Iterable[str], refused: str = _REFUSED) -> None:
        """Allow these names. `refused`: what a request with another name is answered; {shown} is the name and where it
        stands."""
        self._refused = refused
        self._names = {_plain(name) for name in names}
        self.seen: set[bytes] = set()
        """Values of the header that were allowed: most clients send the same one."""

    @classmethod
    def of(cls, config: ProxyConfig) -> AllowedHosts | None:
        """Return the names that a configuration allows; None: any."""
        names = config.allowed_hosts
        if names is None and (config.auth.keys_file is not None or not _is_loopback(_plain(config.host))):
            return None
        if names is not None and ANY in names:
            return None
        return cls((config.host, *(names or ())))

    def refusal(self, host: bytes | None, origin: bytes | None) -> ApiError | None:
        """Return why a request with these headers is not answered; None: it may be."""
        if host is not None and host not in self.seen:
            if not self._allowed(host):
                return self._refusal("Host", host)
            if len(self.seen) < _REMEMBERED:
                self.seen.add(host)
        if origin is not None:
            place = _ORIGIN.fullmatch(origin)
            if place is None or not self._allowed(place[1]):
                return self._refusal("Origin", origin)
        return None

    def _refusal(self, header: str, value: bytes) -> ApiError:
        return ApiError(403, self._refused.format(shown=f"{header} is {value[:100].decode('latin-1')!r}"))

    def _allowed(self, host: bytes) -> bool:
        match = _NAME.fullmatch(host)
        if match is None:
            return False
        name = _plain(match[1].decode("latin-1"))
        return name in self._names or _is_loopback(name)


def _plain(name: str) -> str:
    return name.lower().strip("[]").rstrip(".")


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
