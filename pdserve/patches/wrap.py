"""How a patch takes hold of a function: once, and always around the original.

Whether the function is one that the patch knows was decided before (verdict.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pdserve.errors import StartError

_MARK = "__pdserve_patches__"


def wrap(
    owner: Any,
    attribute: str,
    *,
    patch: str,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces `owner.attribute` by `around(original)`; a target that carries the patch already is left alone.

    Several patches may share a target: each wraps what it finds. Raises StartError when there is no such attribute.
    """
    original = getattr(owner, attribute, None)
    if original is None:
        where = f"{getattr(owner, '__qualname__', None) or owner.__name__}.{attribute}"
        raise StartError(f"patch {patch} does not know this upstream code: {where} does not exist")
    carried: tuple[str, ...] = getattr(original, _MARK, ())
    if patch in carried:
        return
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, _MARK, (*carried, patch))
    setattr(owner, attribute, wrapper)
