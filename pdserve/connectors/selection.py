"""Which child of a MultiConnector loads a request's KV. Pure arithmetic: imports no engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT_PATIENCE_SECONDS = 1.0


class Answer(NamedTuple):
    """What a child's get_num_new_matched_tokens said."""

    tokens: int | None
    """None: it does not know yet."""
    load_async: bool


NO_ANSWER = Answer(None, False)


@dataclass(frozen=True)
class Decision:
    """The child that loads, nobody, or: ask again in the next step."""

    winner: int | None = None
    wait: bool = False
    impatient: bool = False
    """Waits only for a child that could beat one which could load now; such a wait has an end."""


_NOBODY, _NOT_YET = Decision(), Decision(wait=True)


def decide(
    answers: Sequence[Answer],
    weights: Sequence[float],
    *,
    unreleasable: Collection[int] = (),
    patient: bool = True,
) -> Decision:
    """The child with the most tokens x weight; equal ones in the order of the configuration, as upstream.

    A child that does not know yet is waited for when nobody else has tokens. When somebody has, it is waited for only
    if it was given more weight than that one, and only as long as `patient`: LMCache's first answer to every request
    is "not yet", so without that its weight would mean nothing, and without an end one slow lookup would hold back a
    transfer that is ready. `unreleasable`: children whose pending lookup could not be given up without a trace; they
    are waited for as upstream does.
    """
    # By far the most frequent question, so it is cheap.
    unknown = False
    for tokens, _ in answers:
        if tokens:
            break
        unknown = unknown or tokens is None
    else:
        return _NOT_YET if unknown else _NOBODY
    pending = {index for index, answer in enumerate(answers) if answer.tokens is None}
    scores = {index: (answer.tokens or 0) * weights[index] for index, answer in enumerate(answers)}
    best = max(scores, key=lambda index: scores[index])  # max() takes the first of equal ones
    if scores[best] <= 0:
        return Decision(wait=bool(pending))
    if pending & set(unreleasable):
        return Decision(wait=True)
    if patient and any(weights[index] > weights[best] for index in pending):
        return Decision(wait=True, impatient=True)
    return Decision(winner=best)


def load_weight(extra_config: Mapping[str, Any]) -> float:
    """`load_weight` of a child's kv_connector_extra_config, 1.0 by default. Raises ValueError for no usable number."""
    return _number(extra_config, "load_weight", 1.0)


def patience_seconds(extra_config: Mapping[str, Any]) -> float:
    """`lookup_patience_seconds` of MultiConnector's own kv_connector_extra_config."""
    return _number(extra_config, "lookup_patience_seconds", DEFAULT_PATIENCE_SECONDS)


def _number(extra_config: Mapping[str, Any], key: str, default: float) -> float:
    value = extra_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} must be a number that is not negative, not {value!r}")
    return float(value)


def labels(class_names: Sequence[str]) -> tuple[str, ...]:
    """A distinct label for each child: its class name, with its position where several share the class."""
    return tuple(name if class_names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(class_names))
