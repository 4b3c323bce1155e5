"""A recipe against what is known of the installed versions (the tables are in `known`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from pdserve.errors import PreflightError, RecipeError
from pdserve.installed.versions import KNOWN, TESTED
from pdserve.known import DEFECTS, FLAGS, Defect, Flag, is_affected
from pdserve.patches.patch import in_range
from pdserve.plan.model import Versions
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import class_names, kinds_of
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path


def role_features(
    *,
    role: str,
    platform: str,
    connectors: frozenset[str],
    per_tp_rank: bool,
    of_connectors: frozenset[str] = frozenset(),
    lmcache_driven: bool = False,
    async_scheduling: bool = True,
    speculative: bool = False,
    l2: bool = False,
) -> frozenset[str]:
    """Return what a role uses, in the words of DEFECTS. `async_scheduling`: vLLM's default; `of_connectors`: what their
    sections add."""
    used = {*connectors, *of_connectors, f"role={role}", f"platform={platform}"}
    if connectors:
        used.add("connector")
    if async_scheduling:
        used.add("async-scheduling")
    if speculative:
        used.add("speculative-config")
    if per_tp_rank and "LMCacheMPConnector" in connectors:
        used.add("lmcache.per=tp-rank")
    if lmcache_driven and "LMCacheMPConnector" in connectors:
        used.add("transfer_mode=lmcache_driven")
    if platform != "cpu":
        used.add("accelerator")
    if l2:
        used.add("lmcache.l2")
    return frozenset(used)


def check_requires(requires: Iterable[tuple[str, str]], versions: Versions) -> None:
    """Check installed versions against the ranges that the recipe requires. Raises PreflightError for one outside its
    range. Unknown versions pass."""
    for package, text in requires:
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise RecipeError(
                f"{text!r} is not a version range", where=f"requires.{package}", todo='write it as ">=0.26,<0.34"'
            ) from error
        version = _version(package, versions)
        if version is not None and _is_in_range(version, text) is False:
            raise PreflightError(
                f"{package} {version} is installed, the recipe requires {text}",
                where=f"requires.{package}",
                todo=f'install a version in that range, or --set requires.{package}="=={version}" at your own risk',
            )


def check_known(roles: Iterable[frozenset[str]], versions: Versions) -> tuple[str, ...]:
    """Return warnings for every role's features, and raise PreflightError for what is known not to work.

    A version that is not known excludes nothing: no defect is blamed on it.
    """
    warnings: dict[str, None] = {}
    for defect, what in _defects(tuple(roles), versions):
        if defect.refuse:
            raise PreflightError(what, todo=defect.todo)
        warnings[f"{what}; {defect.todo}"] = None
    return tuple(warnings)


def check_flags(flags: Mapping[str, str], package: str, versions: Versions) -> Iterator[str]:
    """Yield warnings for flags that the installed version takes and ignores. Raises PreflightError for a flag that it
    lacks: its process would end at once. `flags`: each with its key in the recipe."""
    for flag, what in _flags(flags, package, versions):
        if not flag.ignored:
            raise PreflightError(what, where=flags[flag.name], todo=flag.todo)
        yield f"{flags[flag.name]}: {what}; {flag.todo}"


def known_hazards(
    roles: Iterable[frozenset[str]], flags: Iterable[tuple[str, Mapping[str, str]]], versions: Versions
) -> Iterator[str]:
    """Yield all that is known of these versions for such a recipe, and raised as nothing: they are those of another
    machine, of an image for example. What would be refused there comes first."""
    found = [(defect.refuse, what, defect.todo) for defect, what in _defects(tuple(roles), versions)]
    for package, keys in flags:
        seen = _flags(keys, package, versions)
        found += [(not flag.ignored, f"{keys[flag.name]}: {what}", flag.todo) for flag, what in seen]
    for refused, what, todo in sorted(dict.fromkeys(found), key=lambda each: not each[0]):
        yield f"{what}; {todo}" + (" (with it installed, pdserve refuses the start)" if refused else "")


def _defects(roles: Sequence[frozenset[str]], versions: Versions) -> Iterator[tuple[Defect, str]]:
    for defect in DEFECTS:
        if not any(defect.needs <= used for used in roles):
            continue
        if not all(is_affected(package, text, versions) for package, text in defect.versions.items()):
            continue
        installed = ", ".join(f"{package} {_version(package, versions)}" for package in defect.versions)
        yield (
            defect,
            f"{installed}: {defect.what} ({defect.source})" if installed else f"{defect.what} ({defect.source})",
        )


def _flags(flags: Mapping[str, str], package: str, versions: Versions) -> Iterator[tuple[Flag, str]]:
    for flag in FLAGS:
        if flag.package == package and flag.name in flags and is_affected(package, flag.versions, versions):
            yield flag, f"{package} {_version(package, versions)} {flag.what}"


def check_coverage(packages: Iterable[str], versions: Versions) -> Iterator[str]:
    """Yield warnings for versions that are unknown, or outside the tested range."""
    for package in packages:
        version, text = _version(package, versions), KNOWN.get(package)
        if version is None:
            yield f"{package} is not installed here, or its version is unknown: nothing about it was checked"
        elif text is not None and not _is_in_range(version, text):
            tested = TESTED.get(package)
            yield f"{package} {version} is outside what is known ({text}); tested with {tested}"


def _version(package: str, versions: Versions) -> str | None:
    version: str | None = getattr(versions, package)
    return version


def _is_in_range(version: str, text: str) -> bool | None:
    """Return whether the version is in the range; None for a version that follows no scheme (a build of a branch)."""
    try:
        return in_range(version, text)
    except InvalidVersion:
        return None


@dataclass(frozen=True)
class RecipeUse:
    """The features, flags and packages of a recipe, whatever is installed."""

    features: tuple[frozenset[str], ...]
    """The features of each role."""
    flags: tuple[tuple[str, Mapping[str, str]], ...]
    """Package, and its flags with their keys in the recipe: of each role, then of LMCache."""
    packages: frozenset[str]
    """That its connectors need."""


def recipe_use(recipe: Recipe) -> RecipeUse:
    """Return what a recipe uses of the packages: features, flags, packages."""
    section = recipe.lmcache
    features: list[frozenset[str]] = []
    flags: list[tuple[str, Mapping[str, str]]] = []
    packages: set[str] = set()
    for name, role, connector in effective.roles(recipe):
        args = effective.args_of(recipe, role)
        flags.append(("vllm", {flag: dotted(flag_path(recipe, name, flag)) for flag in args}))
        packages |= {kind.package for kind in kinds_of(connector)}
        features.append(
            role_features(
                role=name,
                platform=recipe.platform,
                connectors=class_names(connector),
                per_tp_rank=section is not None and section.per == "tp-rank",
                of_connectors=frozenset().union(*(leaf.features() for leaf in effective.sections(connector))),
                lmcache_driven=any(
                    effective.transfer_mode_of(recipe, leaf)[1] == "lmcache_driven"
                    for leaf in effective.lmcache_leaves(connector)
                ),
                async_scheduling=args.get("async-scheduling") is not False,
                speculative=effective.drafts(args),
                l2=section is not None and bool(section.l2),
            )
        )
    if section is not None:
        flags.append(("lmcache", {flag: f"lmcache.extra_args.{flag}" for flag in section.extra_args}))
    return RecipeUse(tuple(features), tuple(flags), frozenset(packages))
