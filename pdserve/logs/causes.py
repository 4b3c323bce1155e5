"""Find why a process died, as far as its last log lines and its exit code show, and what to do about it.

The known causes are data (known_causes). A cause found in the log wins over the signal, the signal over messages that
only report a failure in another place.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.logs.known_causes import LAST_RESORT, RULES, SIGNALS, Rule
from pdserve.logs.lines import may_name_cause, plain_line

_ARGUMENTS = {
    "lmcache": "lmcache.extra_args",
    "mooncake-master": "mooncake_store.extra_args",
    "proxy": "proxy.command",
}


@dataclass(frozen=True)
class Hint:
    """A likely cause and what to do, whole sentences without a full stop."""

    cause: str
    todo: str


def explain(lines: Sequence[str], *, exit_code: int | None, role: str) -> Hint | None:
    """The most specific known cause, None if nothing is recognized.

    `lines` are the end of its log; `exit_code` is negative for a signal (or above 128, as a shell reports it), None
    when the process still lives. Root causes of vLLM stand up to 200 lines before the end of its log,
    not counting what `without_echoes` takes out.
    """
    candidates = [line for line in map(plain_line, lines) if may_name_cause(line)]
    text = "\n".join(candidates)
    return (
        _search(RULES, text, role)
        or _from_exit(exit_code, role)
        or _search(LAST_RESORT, text, role)
        or (_clean_exit(role) if exit_code == 0 else None)
    )


def history_fields(lines: Sequence[str], *, exit_code: int | None, role: str) -> dict[str, str | None]:
    """Return what the history keeps of a cause, None where nothing is recognized: the log goes on with the next
    life."""
    hint = explain(lines, exit_code=exit_code, role=role)
    return {"cause": None, "todo": None} if hint is None else {"cause": hint.cause, "todo": hint.todo}


def _search(rules: Sequence[Rule], text: str, role: str) -> Hint | None:
    for rule in rules:
        if rule.roles is not None and role not in rule.roles:
            continue
        if match := rule.pattern.search(text):
            return hint_of_match(rule, role, match)
    return None


def hint_of_match(rule: Rule, role: str, match: re.Match[str]) -> Hint:
    """Return what a rule means by a line that it matches."""
    return _hint(rule.cause, rule.todo, role, match)


def _hint(cause: str, todo: str, role: str, match: re.Match[str] | None = None) -> Hint:
    groups = {key: value or "" for key, value in match.groupdict().items()} if match else {}
    values = {"role": role, "args": _ARGUMENTS.get(role, f"{role}.args (or engine.args)"), **groups}
    return Hint(cause.format_map(values), todo.format_map(values))


def _from_exit(exit_code: int | None, role: str) -> Hint | None:
    if exit_code is None:
        return None
    number = -exit_code if exit_code < 0 else exit_code - 128 if exit_code > 128 else 0
    try:
        cause, todo = SIGNALS[signal.Signals(number)]
    except (KeyError, ValueError):
        return None
    return _hint(cause, todo, role)


def _clean_exit(role: str) -> Hint:
    return Hint(
        "it ended by itself with exit code 0; a server that ends before `down` has failed, whatever its code",
        f"check that {role}'s command stays in the foreground, and the last lines of its log for what asked it to stop",
    )
