"""How a patch takes hold of its target: by its known signature, once, and always calling the original."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from pdserve.errors import StartError

_MARK = "__pdserve_patch__"


def wrap(
    owner: Any,
    attribute: str,
    *,
    patch: str,
    signatures: Collection[str],
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces `owner.attribute` by `around(original)`; a target that carries the patch already is left alone.

    `signatures` are the known ones, without annotations. Raises StartError when the target is gone or has another
    signature: code that nobody has read must not be wrapped.
    """
    where = f"{getattr(owner, '__qualname__', None) or owner.__name__}.{attribute}"
    original = getattr(owner, attribute, None)
    if original is None:
        raise _unknown(patch, f"{where} does not exist")
    if getattr(original, _MARK, None) == patch:
        return
    found = bare_signature(original)
    if found not in signatures:
        raise _unknown(patch, f"{where}{found} is not one of the known {', '.join(sorted(signatures))}")
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, _MARK, patch)
    setattr(owner, attribute, wrapper)


def bare_signature(function: Callable[..., Any]) -> str:
    """`(self, data, engine_idx=0)`: names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _unknown(patch: str, what: str) -> StartError:
    # One line: all that a log shows of an exception is its message.
    return StartError(
        f"patch {patch} does not know this upstream code: {what}; use a vllm that pdserve supports, or leave the "
        "patch out (recipe: patches) if this version no longer needs it"
    )
