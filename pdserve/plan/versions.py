"""The one table of what is known of each vllm, lmcache and mooncake version, and the check of a recipe against it.

A defect that a patch of ours removes is not here: patches/registry.py knows its versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from pdserve.errors import PreflightError, RecipeError
from pdserve.installed.versions import KNOWN, TESTED
from pdserve.patches.patch import in_range
from pdserve.plan.model import Versions


@dataclass(frozen=True)
class Defect:
    """A combination that is known not to work."""

    versions: Mapping[str, str]
    """Package -> range (PEP 440) that has it; all of them must hold. Empty: every version."""
    needs: frozenset[str]
    """Features (see `features`) that must all be in use."""
    what: str
    source: str
    todo: str
    refuse: bool = field(default=False, kw_only=True)
    """Refused, because it is silent or never works; otherwise a warning."""


DEFECTS: tuple[Defect, ...] = (
    Defect(
        {"vllm": "<0.26"},
        frozenset({"MultiConnector"}),
        "MultiConnector gives a child that did not win the load empty blocks: its second child stores nothing",
        "vllm#46865",
        "use vllm >= 0.26, or a single connector",
        refuse=True,
    ),
    Defect(
        {"vllm": "<0.22.1", "lmcache": ">=0.4.7"},
        frozenset({"LMCacheMPConnector"}),
        "this lmcache's connector does not import on this vllm (KVCacheSpecKind is missing)",
        "import tried with vllm 0.21.0 and lmcache 0.5.6",
        "use vllm >= 0.26",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.4.5"},
        frozenset({"LMCacheMPConnector"}),
        "this lmcache has no connector for its MP server",
        "lmcache 0.4.5 brought lmcache_mp_connector",
        "use lmcache >= 0.5.6",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5"},
        frozenset({"lmcache.per=tp-rank"}),
        "this lmcache's client knows one server only (no lmcache.mp.server_urls)",
        "lmcache 0.5.0 brought server_urls",
        "use lmcache >= 0.5.6, or lmcache.per: node",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.5"},
        frozenset({"MultiConnector", "LMCacheMPConnector", "role=decode"}),
        "on decode, an LMCache child that lost the load to the transfer connector loads all the same, and the request "
        "completes twice: the scheduler's assertion kills the engine",
        "lmcache#4355",
        "use lmcache >= 0.5.6, or lmcache.on: [prefill]",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.6"},
        frozenset({"LMCacheMPConnector", "transfer_mode=lmcache_driven"}),
        "blocks of a preempted request are overwritten while LMCache stores them: wrong KV under its tokens",
        "flush_inflight_stores does nothing in this mode before lmcache 0.5.6; 23 of 200 simulated workloads",
        "use lmcache >= 0.5.6",
    ),
    Defect(
        {"vllm": "<0.30"},
        frozenset({"MooncakeConnector", "role=decode"}),
        "a failed Mooncake transfer is only logged: the request waits until the proxy's deadline",
        "vllm#35943",
        "use vllm >= 0.30, or a short proxy.request_timeout_seconds",
    ),
    Defect(
        {"vllm": "<0.23"},
        frozenset({"LMCacheMPConnector"}),
        "asynchronous loads can deadlock when KV blocks run short",
        "vllm#44560",
        "use vllm >= 0.23, and never cap the load on older ones: that makes it common",
    ),
    Defect(
        {"vllm": ">=0.27,<0.30"},
        frozenset({"connector", "async-scheduling"}),
        "with a connector and overlapping steps two requests that do not fit beside each other in KV memory can "
        "preempt each other for ever",
        "vllm#49674",
        "use vllm >= 0.30, or engine.args.async-scheduling: false",
    ),
    Defect(
        {"vllm": "<0.26"},
        frozenset({"mooncake.device_name"}),
        "this vllm ignores device_name of the mooncake connector",
        "vllm 0.26 brought device_name",
        "use vllm >= 0.26",
    ),
    Defect(
        {},
        frozenset({"LMCacheMPConnector", "platform=rocm"}),
        "LMCache on ROCm must be a ROCm build: PyPI's wheel has CUDA kernels only and falls back to a CPU copy that "
        "is not ordered with the device's stream, which can store wrong KV",
        "lmcache#4870, lmcache#4419",
        "install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1",
    ),
    Defect(
        {},
        frozenset({"MooncakeConnector", "role=decode", "accelerator", "mooncake.protocol=rdma"}),
        "when several transfers run at once over RDMA, decode was reported to have other KV than prefill (Mooncake "
        "0.3.10); with 0.3.13 that was not reproduced",
        "vllm#44238, vllm#42395",
        "let `pdserve verify` compare the output with one engine's; where it differs, use connectors of kind nixl",
    ),
    Defect(
        {"mooncake": "<0.3.12.post1"},
        frozenset({"MooncakeConnector", "mooncake.protocol=tcp"}),
        "over TCP this Mooncake reports a write as done before its bytes are there: decode reads other KV",
        "Mooncake#2850; seen with 0.3.11.post1",
        "use mooncake >= 0.3.13",
        refuse=True,
    ),
    Defect(
        {"lmcache": "<0.5.6"},
        frozenset({"LMCacheMPConnector", "lmcache.l2"}),
        "memory that a failed load from L2 was to fill can become readable: wrong KV",
        "lmcache#5032, lmcache#4991",
        "use lmcache >= 0.5.6, or leave lmcache.l2 out",
    ),
    Defect(
        {},
        frozenset({"LMCacheMPConnector", "lmcache.l2"}),
        "memory that a load from L2 writes to, or a store to L2 reads, is given to others when its lease ends before",
        "lmcache#5263",
        "let lmcache.l1_write_ttl_seconds and lmcache.l1_read_ttl_seconds be far above the slowest transfer of L2",
    ),
)


def features(
    *,
    role: str,
    platform: str,
    connectors: frozenset[str],
    per_tp_rank: bool,
    of_connectors: frozenset[str] = frozenset(),
    lmcache_driven: bool = False,
    async_scheduling: bool = True,
    l2: bool = False,
) -> frozenset[str]:
    """What a role uses, in the words of DEFECTS. `async_scheduling`: vLLM's default; `of_connectors`: what their
    sections add."""
    used = {*connectors, *of_connectors, f"role={role}", f"platform={platform}"}
    if connectors:
        used.add("connector")
    if async_scheduling:
        used.add("async-scheduling")
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
    """Raises PreflightError when an installed version is outside the recipe's range. Unknown versions pass."""
    for package, text in requires:
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise RecipeError(
                f"{text!r} is not a version range", where=f"requires.{package}", todo='write it as ">=0.26,<0.34"'
            ) from error
        version = _version(package, versions)
        if version is not None and _holds(version, text) is False:
            raise PreflightError(
                f"{package} {version} is installed, the recipe requires {text}",
                where=f"requires.{package}",
                todo=f'install a version in that range, or --set requires.{package}="=={version}" at your own risk',
            )


def check_known(roles: Iterable[frozenset[str]], versions: Versions) -> tuple[str, ...]:
    """Warnings for every role's features; PreflightError for what is known not to work.

    A version that is not known excludes nothing: no defect is blamed on it.
    """
    warnings: dict[str, None] = {}
    for defect in DEFECTS:
        if not any(defect.needs <= used for used in roles):
            continue
        if not all(_affected(package, text, versions) for package, text in defect.versions.items()):
            continue
        installed = ", ".join(f"{package} {_version(package, versions)}" for package in defect.versions)
        what = f"{installed}: {defect.what} ({defect.source})" if installed else f"{defect.what} ({defect.source})"
        if defect.refuse:
            raise PreflightError(what, todo=defect.todo)
        warnings[f"{what}; {defect.todo}"] = None
    return tuple(warnings)


def check_coverage(packages: Iterable[str], versions: Versions) -> Iterator[str]:
    """Warnings for versions that are unknown, or outside the tested range."""
    for package in packages:
        version, text = _version(package, versions), KNOWN.get(package)
        if version is None:
            yield f"{package} is not installed here, or its version is unknown: nothing about it was checked"
        elif text is not None and not _holds(version, text):
            tested = TESTED.get(package)
            yield f"{package} {version} is outside what is known ({text}); tested with {tested}"


def _version(package: str, versions: Versions) -> str | None:
    version: str | None = getattr(versions, package)
    return version


def _affected(package: str, text: str, versions: Versions) -> bool:
    version = _version(package, versions)
    return version is not None and _holds(version, text) is True


def _holds(version: str, text: str) -> bool | None:
    """Whether the version is in the range; None for a version that follows no scheme (a build of a branch)."""
    try:
        return in_range(version, text)
    except InvalidVersion:
        return None
