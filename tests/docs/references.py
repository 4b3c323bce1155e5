"""What is made of docs/: the references, between two marks of pages whose other lines are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from typer.core import TyperGroup
from typer.testing import CliRunner

from pdserve.cli.commands import app, command
from pdserve.installed.versions import KNOWN, TESTED, Versions
from pdserve.known import Fact, Kind, facts
from pdserve.patches.patch import Patch
from pdserve.patches.registry import REGISTRY
from tests.docs import launches, recipe_reference
from tests.docs.markdown import REPOSITORY

_BEGIN, _END = "<!-- begin: written by python -m tests.regenerate -->\n\n", "\n<!-- end -->\n"
_WIDTH = 100
_RELEASES = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""The releases of vllm whose sources were read."""
_TITLES: dict[Kind, str] = {
    "defect, refused": "Refused",
    "defect, warned of": "Warned of",
    "defect, patched": "Corrected by a patch",
    "flag, refused": "Flags that a version lacks",
    "flag, warned of": "Flags that a version ignores",
}


def page(name: str) -> str:
    """Return a page with its made part anew."""
    before, begin, rest = (REPOSITORY / "docs" / name).read_text().partition(_BEGIN)
    assert begin, f"{name} has no {_BEGIN}"
    return before + begin + "\n".join(MADE[name]()).rstrip() + "\n" + _END + rest.partition(_END)[2]


@cache
def root() -> TyperGroup:
    """Return the command that `pdserve` runs."""
    whole = command()
    assert isinstance(whole, TyperGroup)
    return whole


def _cli() -> Iterator[str]:
    """Yield the `--help` of every verb, at a fixed width."""
    for path in ((), *((verb,) for verb in root().commands)):
        result = CliRunner().invoke(
            app, [*path, "--help"], prog_name="pdserve", terminal_width=_WIDTH, max_content_width=_WIDTH
        )
        assert result.exit_code == 0, result.output
        lines = [line.rstrip() for line in result.output.strip().splitlines()]
        yield from (f"## {' '.join(('pdserve', *path))}", "", "```text", *lines, "```", "")


def _patches() -> Iterator[str]:
    yield "| patch | for | needed by | kind |\n|---|---|---|---|"
    for patch in REGISTRY:
        kind = "required" if patch.required else "optional"
        left_out = ", left out of unknown code" if patch.serves_without else ""
        need = ", ".join(_needed_by(patch))
        yield f"| [{patch.name}](#{patch.name}) | {patch.behaviour} | {need} | {kind}{left_out}, {patch.vehicle} |"
    for patch in REGISTRY:
        yield f"\n## {patch.name}\n\n{patch.summary}\n\n- Upstream: {patch.issue}"
        yield f"- Targets: {', '.join(f'`{target.name}`' for target in patch.targets)}"
        yield f"- Has an effect in: {', '.join(patch.runs_in)}"
        yield from (f"- Counts `{effect}`: {text}" for effect, text in patch.effects.items())
        yield from (f"- Reports `{gauge}`: {text}" for gauge, text in patch.gauges.items())
        if patch.serves_without:
            yield f"- Without it: {patch.serves_without}"
        if patch.instead:
            yield f"- To do without it: {patch.instead}"
        yield f"- Can go when: {patch.remove_when}"


def _needed_by(patch: Patch) -> Iterator[str]:
    yield f"vllm `{patch.vllm}`" if patch.vllm else "every vllm so far"
    if patch.lmcache:
        yield f"lmcache `{patch.lmcache}`"
    if patch.connectors:
        yield " and ".join(sorted(patch.connectors))
    if others := sorted(patch.spared - patch.connectors):
        yield f"with a connector that is none of {', '.join(others)}"
    if len(patch.platforms) < 3:
        yield " or ".join(patch.platforms)
    if patch.settings:
        yield f"setting {' or '.join(f'`{setting}`' for setting in sorted(patch.settings))}"


def _versions() -> Iterator[str]:
    """Yield how many facts hold of each release of vllm with the other packages as tested, and then the facts."""
    others = ", ".join(f"{package} {version}" for package, version in TESTED.items() if package != "vllm")
    yield "## By release of vllm\n"
    yield f"How many rows below hold with {others}, whatever is in use. pdserve knows vllm `{KNOWN['vllm']}`,"
    yield f"lmcache `{KNOWN['lmcache']}` and mooncake `{KNOWN['mooncake']}`; it was tested with {TESTED['vllm']}.\n"
    kinds: list[Kind] = [*(kind for kind in _TITLES if kind != "flag, refused"), "flag, refused"]
    yield f"| vllm | {' | '.join(_TITLES[kind].lower() for kind in kinds[:-1])} | flags that it lacks |"
    yield f"|---|{'---|' * len(kinds)}"
    for release in _RELEASES:
        versions = Versions.model_validate({**TESTED, "vllm": release})
        holding = [fact.kind for fact in facts() if fact.holds(versions)]
        yield f"| {release} | {' | '.join(str(holding.count(kind)) for kind in kinds)} |"
    for kind, title in _TITLES.items():
        yield f"\n## {title}\n\n| versions | with | what | source | what to do |\n|---|---|---|---|---|"
        yield from (f"| {' | '.join(_fact(fact))} |" for fact in facts() if fact.kind == kind)


def _fact(fact: Fact) -> Iterator[str]:
    yield ", ".join(f"{package} `{text}`" for package, text in fact.versions.items()) or "every version that was read"
    yield ", ".join(f"`{need}`" for need in fact.needs) or "any recipe"
    for text in (fact.what, fact.source, fact.todo):
        yield " ".join(text.replace("|", "/").split())


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "recipe.md": recipe_reference.recipe_sections,
    "cli.md": _cli,
    "patches.md": _patches,
    "kimi-launches.md": launches.kimi_sections,
    "launches.md": launches.other_sections,
    "versions.md": _versions,
}


def main() -> None:
    """Write every page anew."""
    for name in MADE:
        (REPOSITORY / "docs" / name).write_text(page(name))
