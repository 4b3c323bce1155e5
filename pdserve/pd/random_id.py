"""Names for requests and transfers: 128 random bits that cannot be foreseen, for an engine may keep things by them."""

from __future__ import annotations

import os

_BYTES, _AT_ONCE = 16, 256
_stock: list[str] = []
# A child would hand out its parent's.
os.register_at_fork(after_in_child=_stock.clear)


def new_id() -> str:
    """Return 32 new hex digits. The kernel is asked for many at once."""
    if not _stock:
        digits, width = os.urandom(_BYTES * _AT_ONCE).hex(), 2 * _BYTES
        _stock.extend([digits[at : at + width] for at in range(0, len(digits), width)])
    return _stock.pop()
