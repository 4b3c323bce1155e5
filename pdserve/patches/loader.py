"""Applies patches to this process: judged first, all or nothing, then reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.errors import StartError
from pdserve.patches.fingerprint import Fingerprint, of_loaded
from pdserve.patches.patch import Patch
from pdserve.patches.record import PatchStanding, Publisher, begin, process_kind, process_name, register_metrics
from pdserve.patches.registry import find
from pdserve.patches.verdict import Verdict, decide, judge, of_installed, remedy, versions_here


def load_named(names: Iterable[str], *, allow_unknown: Iterable[str], folder: str | None) -> PatchStanding:
    """Apply the patches of these names, in this order, and publishes what came of each.

    Raises StartError before anything is applied when one meets code that it does not know and may not be left out
    (`decide`); the others are left out then, with a warning.
    """
    given = [name for name in dict.fromkeys(name.strip() for name in names) if name]
    patches = [find(name) for name in given]
    allowed = {name.strip() for name in allow_unknown if name.strip()}
    versions = versions_here()
    verdicts = [(patch, _judge(patch, versions)) for patch in patches]
    for patch, verdict in verdicts:
        if decide(patch, verdict, allowed) == "refused":
            raise _refusal(patch, verdict)
    standing = begin()
    for patch, verdict in verdicts:
        _take(patch, verdict, allowed, standing)
    Publisher(standing, folder).start()
    if folder and process_kind(process_name()) == "api-server":
        register_metrics(folder)
    return standing


def _judge(patch: Patch, versions: Mapping[str, str | None]) -> Verdict:
    """Judge a patch. Subclasses and what they derive from are imported by vLLM when it builds a connector, and judged
    by sources."""
    return judge(patch, versions, look=of_installed if patch.vehicle == "subclass" else _look)


def _look(name: str) -> Fingerprint | None:
    # lmcache is not imported here: it brings numba, and vLLM's CPU worker then fails at the registration of its kernels
    # (_rebind_kernels of vllm 0.32 reads every loaded module).
    return of_installed(name) if name.startswith("lmcache.") else of_loaded(name)


def _take(patch: Patch, verdict: Verdict, allowed: set[str], standing: PatchStanding) -> None:
    decision = decide(patch, verdict, allowed)
    if decision == "not-needed":
        standing.not_needed[patch.name] = verdict.why
        return
    if decision == "left-out":
        standing.skipped[patch.name] = f"{verdict.why}; {patch.serves_without}" if patch.serves_without else verdict.why
        return
    standing.active.append(patch.name)
    patch.apply()
    if verdict.outcome == "unknown":
        standing.allowed_unknown.append(patch.name)


def _refusal(patch: Patch, verdict: Verdict) -> StartError:
    # One line: all that a log shows of an exception is its message.
    return StartError(
        f"patch {patch.name} does not know this upstream code: {verdict.why}; {remedy(patch)} in the recipe"
    )
