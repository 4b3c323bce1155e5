"""docs/patches.md: every patch, and what became of every behaviour of the pull requests, from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pdserve.installed.versions import KNOWN
from pdserve.patches.patch import Behaviour, Patch
from pdserve.patches.registry import REGISTRY
from tests.docs.behaviours import BEHAVIOURS, Outcome

_HEAD = """\
# Patches

Corrections of vLLM and LMCache that a deployment needs today. Made from the registry (`pdserve/patches/registry.py`) by
`python -m tests.docs.regenerate`; a test fails when it drifts. `pdserve patches` shows the same with what applies to
this environment and what is active where.

- **Beside upstream.** A patch wraps upstream's function, or is a subclass that vLLM loads by
  `kv_connector_module_path`; it never replaces code.
- **Versions suggest, fingerprints decide.** Before a patch is applied, the signature of its target, and the hash of its
  body where the patch depends on it, are compared with those of the releases it was tested on
  (`pdserve/patches/fingerprints.json`). A build without tags, or with a version outside of what is known, that has the
  code of a release is planned for as that release. Unknown code: a required patch refuses to start; an optional one,
  and a required one without which normal traffic is served, is left out with a warning.
  `allow_unknown_upstream: [NAME]` in the recipe applies it all the same; `status` shows it.
- **Judged before anything starts.** `pdserve preflight`, and `up` before its first process, let the engines' own
  interpreter judge the patches on every node, in the recipe's container if there is one, by the function that the
  engines decide with when they start: what would be applied, left out or refused, why, and what to do.
- **Proof of life.** The API server, EngineCore and every worker report their active patches, in their log and in a
  record that `up` reads: an engine in which one process lacks a required patch does not start. What the patches do is
  counted, shown by `pdserve status`, and on the engine's `/metrics` as `pdserve_patch_effects_total{patch,effect}` and
  `pdserve_patch_state{patch,effect}` (with several API servers in front of one engine only in `status`).
- `patches: auto` (the default) applies what the versions, the connectors and the settings of a recipe need. A list
  applies exactly those. A `VLLM_PLUGINS` of the recipe is kept and appended to.
- `python -m tests.upstream.canary` prints what a newer vLLM or LMCache release has changed under the patches.

What was wrong in the pull requests that these patches grew from, and how each claim was checked, is in
[published-patches.md](published-patches.md). Which reports of upstream have no patch, and why, is in
[reported-defects.md](reported-defects.md).
"""

_VERSIONS = """\
## Supported versions

Patches are for vllm `{vllm}` and lmcache `{lmcache}`: what the shipped recipes require, what
`pdserve[cuda]` installs, and what the patches are tested on. A patch that only older releases need is deleted. Older
images and wheels are in use (published runs had vLLM 0.21 to 0.24 and LMCache 0.5.1 to 0.5.3), but `requires` refuses
them; their known defects are in [versions.md](versions.md). A recipe without `requires` gets a warning, and patches
meet unknown code there, with the consequences above.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [_HEAD, *_overview(), *_versions(), *(line for patch in REGISTRY for line in _patch(patch)), *_behaviours()]
    )


def _overview() -> Iterator[str]:
    yield "| patch | for | needed by | kind |\n|---|---|---|---|"
    for patch in REGISTRY:
        yield f"| [{patch.name}](#{patch.name}) | {patch.behaviour} | {_needed_by(patch)} | {_kind(patch)} |"
    yield ""


def _versions() -> Iterator[str]:
    yield _VERSIONS.format(**KNOWN)


def _kind(patch: Patch) -> str:
    required = "required" if patch.required else "optional"
    return f"{required}{', left out of unknown code' if patch.serves_without else ''}, {patch.vehicle}"


def _needed_by(patch: Patch) -> str:
    parts = [f"vllm {_escaped(patch.vllm)}" if patch.vllm else "every vllm so far"]
    if patch.lmcache:
        parts.append(f"lmcache {_escaped(patch.lmcache)}")
    if patch.connectors:
        parts.append(" and ".join(sorted(patch.connectors)))
    if others := sorted(patch.spared - patch.connectors):
        parts.append(f"with a connector that is none of {', '.join(others)}")
    if len(patch.platforms) < 3:
        parts.append(" or ".join(patch.platforms))
    if patch.settings:
        parts.append(f"setting {' or '.join(f'`{setting}`' for setting in sorted(patch.settings))}")
    return ", ".join(parts)


def _escaped(specifier: str) -> str:
    return f"`{specifier}`"


def _patch(patch: Patch) -> Iterator[str]:
    yield f"## {patch.name}\n"
    yield f"{patch.summary}\n"
    yield f"- Upstream: {patch.issue}"
    yield f"- Targets: {', '.join(f'`{target.name}`' for target in patch.targets)}"
    yield f"- Has an effect in: {', '.join(patch.runs_in)}"
    for effect, text in patch.effects.items():
        yield f"- Counts `{effect}`: {text}"
    for gauge, text in patch.gauges.items():
        yield f"- Reports `{gauge}`: {text}"
    if patch.serves_without:
        yield f"- Without it: {patch.serves_without}"
    if patch.instead:
        yield f"- To do without it: {patch.instead}"
    yield f"- Can go when: {patch.remove_when}\n"


def _behaviours() -> Iterator[str]:
    yield "## What became of every behaviour\n"
    yield "Each line names the test that shows the defect, and its absence with the patch or in newer code.\n"
    yield "| behaviour | verdict | where | test |\n|---|---|---|---|"
    order = get_args(Behaviour)
    for outcome in sorted(BEHAVIOURS, key=lambda each: order.index(each.behaviour)):
        yield f"| {outcome.behaviour}: {outcome.what} | {_verdict(outcome)} | {outcome.where} | `{outcome.test}` |"
    yield ""


def _verdict(outcome: Outcome) -> str:
    return f"upstream's since {outcome.since}" if outcome.verdict == "upstream" else outcome.verdict
