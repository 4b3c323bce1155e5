"""Choose the child of a MultiConnector that loads a request's KV. Pure arithmetic: imports no engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT_PATIENCE_SECONDS = 1.0


class ChildAnswer(NamedTuple):
    """The result of a child's get_num_new_matched_tokens."""

    tokens: int | None
    """None: its lookup has not ended."""
    load_async: bool


NO_ANSWER = ChildAnswer(None, False)


@dataclass(frozen=True)
class ChildChoice:
    """The child that loads, none, or: ask again in the next step."""

    winner: int | None = None
    wait: bool = False
    impatient: bool = False
    """The wait is for a heavier child while another could load now. Such a wait has a limit."""


_NO_CHILD, _NOT_YET = ChildChoice(), ChildChoice(wait=True)


def decide(
    answers: Sequence[ChildAnswer],
    weights: Sequence[float],
    *,
    unreleasable: Collection[int] = (),
    patient: bool = True,
) -> ChildChoice:
    """Return the child with the most tokens x weight. Among equals the first in the configuration wins, as upstream.

    A child whose lookup is pending is waited for when no other child has tokens. When another has, the pending child is
    waited for only if its weight is larger, and only as long as `patient`. Why wait at all: LMCache answers every
    request with "pending" first, so its weight would have no effect. Why a limit: a slow lookup would hold back a
    transfer that is ready. `unreleasable`: children whose pending lookup cannot be cancelled without leaving locks;
    they are waited for as upstream does.
    """
    # The result of nearly every poll, so it is cheap.
    unknown = False
    for tokens, _ in answers:
        if tokens:
            break
        unknown = unknown or tokens is None
    else:
        return _NOT_YET if unknown else _NO_CHILD
    pending = {index for index, answer in enumerate(answers) if answer.tokens is None}
    scores = {index: (answer.tokens or 0) * weights[index] for index, answer in enumerate(answers)}
    best = max(scores, key=lambda index: scores[index])  # max() takes the first among equals
    if scores[best] <= 0:
        return ChildChoice(wait=bool(pending))
    if pending & set(unreleasable):
        return ChildChoice(wait=True)
    if patient and any(weights[index] > weights[best] for index in pending):
        return ChildChoice(wait=True, impatient=True)
    return ChildChoice(winner=best)


def load_weight(extra_config: Mapping[str, Any]) -> float:
    """Return `load_weight` of a child's kv_connector_extra_config, 1 by default. Raises ValueError unless it is >=
    0."""
    return _number(extra_config, "load_weight", 1.0)


def patience_seconds(extra_config: Mapping[str, Any]) -> float:
    """Return `lookup_patience_seconds` of MultiConnector's own kv_connector_extra_config."""
    return _number(extra_config, "lookup_patience_seconds", DEFAULT_PATIENCE_SECONDS)


def _number(extra_config: Mapping[str, Any], key: str, default: float) -> float:
    value = extra_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} must be a number that is not negative, not {value!r}")
    return float(value)


def labels(class_names: Sequence[str]) -> tuple[str, ...]:
    """Return a distinct label for each child: its class name, with its position where several share the class."""
    return tuple(name if class_names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(class_names))
