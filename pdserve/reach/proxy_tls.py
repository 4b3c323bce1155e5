"""TLS towards the deployment's own proxy (`proxy.tls`): encrypted as its clients must be, and not verified.

Its certificate names what clients call it, not the address that we ask, and may be signed by a site's own authority.
That the proxy is ours is known better: a probe asks the kernel whose socket it is.
"""

from __future__ import annotations

import ssl
from functools import cache


@cache
def unverified() -> ssl.SSLContext:
    """Reads no certificates of the machine, which takes 30 ms and 1 MiB."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
