"""Proof `load-reload`: after each clearing the prefix of every group came back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdserve.verify.load.options import GROUPS
from pdserve.verify.load.reload import Came, PrefixReload, common_place
from pdserve.verify.load.traffic import SentWindow, Traffic
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target

_CLAIM = (
    "After each time that the engines' own caches were cleared, a prompt of each group was sent alone, and its group's "
    "prefix was loaded again"
)

_Cleared = tuple[SentWindow, tuple[PrefixReload, ...]]
"""A window before which the caches were cleared, and its reloads."""


def claim(target: Target) -> str:
    """Where engines do not reload from the same place, one may be chosen that never had a prefix."""
    return f"{_CLAIM}." if common_place(target) else f"{_CLAIM} wherever it was known to be kept."


def prove(target: Target, traffic: Traffic) -> Outcome:
    if not target.plan.cache_reset_endpoint:
        return not_proven(
            "engine.cache_reset_endpoint is off in the recipe: the engines' own caches cannot be cleared, so reloads "
            "look like local hits"
        )
    cleared = [(window, window.reloads) for window in traffic.windows if window.reloads is not None]
    numbers = _numbers(cleared)
    if lost := _with(cleared, "lost"):
        servers = [server.process for server in target.plan.lmcache]
        engines = [reload.engine for _, reload in lost if reload.engine] or [w.name for w in target.producers]
        logs = ", ".join(target.log(name) for name in dict.fromkeys((*servers, *engines)))
        return failed(
            f"prefixes that prompts share were computed again instead of being loaded ({_listed(lost)}): they were not "
            f"stored, or they were evicted; see {logs}",
            numbers,
        )
    if traffic.not_cleared is not None:
        raise traffic.not_cleared
    if not numbers["times cleared"]:
        return not_proven(
            "no window was answered from its begin on after the caches were cleared: give --requests, or --seconds, "
            "for more than one window, or a smaller --window",
            numbers,
        )
    if reason := _why_open(target, cleared):
        return not_proven(reason, numbers)
    return proven(numbers)


def _why_open(target: Target, cleared: Sequence[_Cleared]) -> str:
    """Why it is not known that all prefixes came back. Empty: it is."""
    begins = [
        window.served[len(reloads)] for window, reloads in cleared if len(reloads) < min(GROUPS, len(window.served))
    ]
    if failures := [str(request.planned.number) for request in begins]:
        return f"requests that had to reload a prefix were not answered: {', '.join(failures)}"
    if uncounted := _with(cleared, "uncounted"):
        return (
            "the engines do not count where the tokens of their prompts came from or how large their blocks are, could "
            f"not be read, or have not counted a prompt in time (the first: {_listed(uncounted[:1])})"
        )
    if disturbed := _with(cleared, "disturbed"):
        return (
            "others were served meanwhile, and may have loaded what looks like a prefix "
            f"({_listed(disturbed)}): prove it while the deployment serves nothing else"
        )
    looked = [reload for _, reloads in cleared for reload in reloads if reload.came != "too-short"]
    if not looked:
        least = target.plan.min_load_tokens
        minimum = f"reloads below min_load_tokens ({least}) are computed" if least else "less than a block is computed"
        return f"{minimum}, as all of these prefixes are"
    if never := {reload.group for reload in looked} - {reload.group for reload in looked if reload.came == "back"}:
        return (
            f"the prefixes of {', '.join(f'group {group}' for group in sorted(never))} were asked for only where they "
            "may never have been: a prompt may go to another engine, which reloads from elsewhere. A longer load, or a "
            "smaller --window, asks more often"
        )
    return ""


def _numbers(cleared: Sequence[_Cleared]) -> Numbers:
    came = Counter(reload.came for _, reloads in cleared for reload in reloads)
    expected = [reload for _, reloads in cleared for reload in reloads if reload.came not in ("new", "too-short")]
    numbers: Numbers = {
        "times cleared": sum(len(reloads) == GROUPS for _, reloads in cleared),
        "prefixes expected": len(expected),
        "prefixes loaded": came["back"],
        "tokens expected": sum(reload.wanted for reload in expected),
        "tokens loaded": sum(reload.loaded or 0 for reload in expected),
    }
    if came["new"]:
        numbers["prefixes not known to be there"] = came["new"]
    if came["too-short"]:
        numbers["prefixes too short to be loaded"] = came["too-short"]
    return numbers


def _with(cleared: Sequence[_Cleared], came: Came) -> list[tuple[SentWindow, PrefixReload]]:
    return [(window, reload) for window, reloads in cleared for reload in reloads if reload.came == came]


def _listed(reloads: Sequence[tuple[SentWindow, PrefixReload]]) -> str:
    """`requests 16-31: group 1 (cache_salt pdserve-verify-1a2b-load-1): 0 of 512 tokens by prefill-0`."""
    return "; ".join(
        f"requests {window.first}-{window.last}: group {reload.group} (cache_salt {reload.salt}): "
        f"{'?' if reload.loaded is None else reload.loaded} of {reload.wanted} tokens"
        f"{f' by {reload.engine}' if reload.engine else ''}"
        for window, reload in reloads
    )
