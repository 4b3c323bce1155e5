"""What is wrong with several nodes as one error, so that all can be corrected at once."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import PreflightError


def together(
    errors: Sequence[PreflightError], what: str, *, todo: str | None, also: Sequence[str] = ()
) -> PreflightError:
    """One error is itself; several become `what`, with each of them among the evidence. What they have in common is
    given once. `also`: further lines."""
    first = errors[0]
    if len(errors) == 1:
        first.evidence = (*first.evidence, *also)
        return first
    where = first.where if all(error.where == first.where for error in errors) else None
    cause = first.cause if all(error.cause == first.cause for error in errors) else None
    lines: list[str] = []
    for error in errors:
        lines.append(error.what if error.where in (None, where) else f"{error.where}: {error.what}")
        if error.cause and error.cause != cause:
            lines.append(f"  {error.cause}")
        lines.extend(f"  {line}" for line in error.evidence)
    return PreflightError(what, where=where, cause=cause, todo=todo, evidence=(*lines, *also))
