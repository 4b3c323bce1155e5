"""Rules of the engines' flags and variables: those that pdserve sets, loads, ROCm's switches, weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.recipe import effective
from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.connectors.registry import AnyConnector, MultiSection, RawSection
from pdserve.recipe.effective import (
    LOAD_CAP_SWITCH,
    SHORT,
    SPECULATIVE,
    HubModel,
    args_of,
    draft_models,
    hub_models,
    leaf_connectors,
    load_cap_of,
    roles,
)
from pdserve.recipe.flags import ENGINE_FLAGS, env_instead, known_flags, where_instead
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Path, Problem, did_you_mean
from pdserve.recipe.model import Recipe
from pdserve.recipe.vllm_names import READ_IN_OTHER_PLACES, VARIABLES, VERSION
from pdserve.roles import ENGINE_ROLES

_UTILIZATION = ("gpu-memory-utilization", "device-memory-utilization")


def owned_flags(recipe: Recipe) -> Iterator[Problem]:
    """Refuse flags that pdserve sets itself, and flags that blind it."""
    for section, args in _sections(recipe, "args"):
        for flag, value in args.items():
            path = (section, "args", flag)
            if value is None:
                continue
            if (instead := where_instead(flag, section)) is not None:
                yield Problem(path, "pdserve sets this flag", instead)
            elif flag == "disable-log-stats" and value is not False:
                yield Problem(
                    path,
                    "`status` and `verify` read the metrics that it turns off",
                    "remove it; the crash of MultiConnector that it avoids is patched (vllm#43828)",
                )
            elif flag == "enable-prompt-tokens-details" and value is False:
                yield Problem(path, "`verify` proves the transfer of KV by these details", "remove it")
            elif flag.startswith("no-") and flag[3:] in known_flags():
                yield Problem(path, "a flag is turned off by its value", f"write {flag[3:]}: false")


def conditional_flags(recipe: Recipe) -> Iterator[Problem]:
    """Refuse flags that pdserve sets itself in some recipes."""
    reported: set[Path] = set()
    for name, role in recipe.roles():
        for flag in args_of(recipe, role):
            owned, path = ENGINE_FLAGS.get(flag), flag_path(recipe, name, flag)
            if owned is None or owned.condition is None or path in reported or not owned.condition.holds(recipe, name):
                continue
            reported.add(path)
            what = f"pdserve sets this flag {owned.condition.text}"
            yield Problem(path, what, owned.instead, also=(owned.condition.path(name),))


def owned_variables(recipe: Recipe) -> Iterator[Problem]:
    """Refuse variables that pdserve sets itself."""
    for section, env in _sections(recipe, "env"):
        for variable in env:
            path = (section, "env", variable)
            if (instead := env_instead(variable, section)) is not None:
                yield Problem(path, "pdserve sets this variable", instead)


def unknown_flags(recipe: Recipe) -> Iterator[Problem]:
    """Warn of flags that the vLLM this was written against does not have."""
    for section, args in _sections(recipe, "args"):
        for flag, value in args.items():
            if flag in known_flags() or value is None:
                continue
            guess = did_you_mean(flag, known_flags())
            yield Problem(
                (section, "args", flag),
                f"vLLM {VERSION} has no such flag",
                f"did you mean {guess}?" if guess else None,
            )


def unknown_variables(recipe: Recipe) -> Iterator[Problem]:
    """Warn of variables that the vLLM this was written against does not read: it logs a warning, and runs as if they
    were not set. The names of `environment_variables` in its envs.py are in vllm_names.py."""
    sections = list(_sections(recipe, "env"))
    if recipe.container is not None:
        sections.append(("container", dict(recipe.container.env)))
    for section, env in sections:
        for variable in env:
            if variable.startswith("VLLM_") and variable not in VARIABLES | READ_IN_OTHER_PLACES:
                guess = did_you_mean(variable, VARIABLES)
                yield Problem(
                    (section, "env", variable),
                    f"vLLM {VERSION} reads no such variable",
                    f"did you mean {guess}?" if guess else None,
                )


def memory_utilization(recipe: Recipe) -> Iterator[Problem]:
    """Refuse what is no part of the device's memory: vLLM refuses it only after its imports (`gt=0, le=1` in
    config/cache.py)."""
    for section, args in _sections(recipe, "args"):
        for flag in _UTILIZATION:
            value = args.get(flag)
            if value is None or 0 < (number := _number(value)) <= 1:
                continue
            todo = "write a number above 0, 1 at most: 0.9 is 90%"
            yield Problem(
                (section, "args", flag),
                f"{show.value(value)} is no part of the device's memory",
                f"write {number / 100:g}" if 1 < number <= 100 else todo,
            )


def _number(value: object) -> float:
    """Return the number of a flag's value, with a per cent sign or not; 0: it is none."""
    try:
        return float(str(value).strip().removesuffix("%"))
    except ValueError:
        return 0.0


def flag_path(recipe: Recipe, role: str, flag: str) -> Path:
    """Return where the flag that counts for `role` is written."""
    section = getattr(recipe, role)
    return (role, "args", flag) if section is not None and flag in section.args else ("engine", "args", flag)


def env_path(recipe: Recipe, role: str, variable: str) -> Path:
    """Return where the variable that counts for `role` is written."""
    section = getattr(recipe, role)
    return (role, "env", variable) if section is not None and variable in section.env else ("engine", "env", variable)


def _sections(recipe: Recipe, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    yield "engine", getattr(recipe.engine, key)
    for name, role in recipe.roles():
        yield name, getattr(role, key)


def weight_loading(recipe: Recipe) -> Iterator[Problem]:
    """Refuse the weight of a connector alone: weights compare children of a multi."""
    for name, _, connector in roles(recipe):
        if connector is None or isinstance(connector, MultiSection | RawSection) or connector.load_weight is None:
            continue
        yield Problem(
            (name, "connector", "load_weight"),
            "only children of a multi are weighed against each other",
            "remove it, or put the connector into kind: multi",
        )


def load_caps(recipe: Recipe) -> Iterator[Problem]:
    """Check the caps of loads. A cap below one chunk, or below the minimum, means that nothing is ever loaded."""
    chunk = recipe.lmcache.chunk_size if recipe.lmcache is not None else None
    for name, role, connector in roles(recipe):
        for path, leaf in _lmcache_leaves(name, connector):
            cap, least = load_cap_of(recipe, role, leaf), leaf.min_load_tokens
            if cap is not None and chunk is not None and cap < chunk:
                yield Problem(
                    (*path, "max_tokens_per_load"),
                    f"LMCache loads whole chunks of {chunk} tokens, so a cap of {cap} loads nothing",
                    f"use a multiple of {chunk}",
                    also=(("lmcache", "chunk_size"),),
                )
            if cap is not None and least is not None and cap < least:
                yield Problem(
                    (*path, "min_load_tokens"),
                    f"no load of at most {cap} tokens has {least} of them, so nothing is ever loaded",
                    "lower it, or raise max_tokens_per_load",
                    also=((*path, "max_tokens_per_load"),),
                )


def load_cap_switches(recipe: Recipe) -> Iterator[Problem]:
    """Refuse the environment's way to set the cap."""
    for section in ("engine", *ENGINE_ROLES):
        env = getattr(getattr(recipe, section), "env", {})
        value = env.get(LOAD_CAP_SWITCH)
        if value is not None and not (str(value).strip().isascii() and str(value).strip().isdecimal()):
            yield Problem((section, "env", LOAD_CAP_SWITCH), f"{value} is not a number of tokens", "0 turns it off")


def load_timeouts(recipe: Recipe) -> Iterator[Problem]:
    """Check the timeouts of loads. A timeout of loads needs a connector whose settings are ours."""
    for name, role, connector in roles(recipe):
        if role.load_timeout_seconds is None:
            continue
        path: Path = (name, "load_timeout_seconds")
        if connector is None:
            yield Problem(path, f"{name} has no connector, so it never loads KV", "remove it")
        elif isinstance(connector, RawSection):
            yield Problem(
                path,
                "a raw connector is handed to vLLM as it is",
                "put load_timeout_seconds into its kv_connector_extra_config, and name the patch in `patches`",
            )


def uneven_load_caps(recipe: Recipe) -> Iterator[Problem]:
    """Warn of a cap that is rounded."""
    chunk = recipe.lmcache.chunk_size if recipe.lmcache is not None else None
    for name, _, connector in roles(recipe):
        for path, leaf in _lmcache_leaves(name, connector):
            if chunk is not None and leaf.max_tokens_per_load is not None and leaf.max_tokens_per_load % chunk:
                yield Problem(
                    (*path, "max_tokens_per_load"),
                    f"not a multiple of LMCache's chunk: {leaf.max_tokens_per_load // chunk * chunk} tokens are loaded",
                    f"use a multiple of {chunk}",
                )


def _lmcache_leaves(name: str, connector: AnyConnector | None) -> Iterator[tuple[Path, LmcacheMpSection]]:
    for index, leaf in enumerate(leaf_connectors(connector)):
        if isinstance(leaf, LmcacheMpSection):
            yield (
                ((name, "connector", "of", index) if isinstance(connector, MultiSection) else (name, "connector")),
                leaf,
            )


_ON_OFF = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR"
_STEP = "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB"
_IDLE = ("LMCACHE_ROCM_MP_BLOCK_FALLBACK", "LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE")
"""Of a patch for lmcache < 0.4.7 that is gone; published recipes set them."""


def rocm_switches(recipe: Recipe) -> Iterator[Problem]:
    """Check variables that ask for patches of the LMCache server (plan/patching.py)."""
    for section in ("engine", *ENGINE_ROLES):
        for variable in getattr(getattr(recipe, section), "env", {}):
            if variable in (_ON_OFF, _STEP, *_IDLE):
                yield Problem(
                    (section, "env", variable), "engines know nothing of it: it is for the LMCache server",
                    "write it into lmcache.env",
                )  # fmt: skip
    if recipe.lmcache is None:
        return
    for variable, value in recipe.lmcache.env.items():
        path, text = ("lmcache", "env", variable), str(value).strip()
        if variable == _ON_OFF and text not in ("0", "1"):
            yield Problem(path, f"{text} is neither 1 (on) nor 0 (off)")
        elif variable == _STEP and not _positive(text):
            yield Problem(path, f"{text} is not a positive number of GiB", "64 unless it is set")


def idle_rocm_switches(recipe: Recipe) -> Iterator[Problem]:
    """Warn of switches that nothing reads: on other platforms all, on ROCm those of the patch that is gone."""
    if recipe.lmcache is None:
        return
    for variable in recipe.lmcache.env:
        if variable in _IDLE:
            yield Problem(
                ("lmcache", "env", variable), "has no effect: lmcache 0.4.7 and later copy blocks", "remove it"
            )
        elif variable in (_ON_OFF, _STEP) and recipe.platform != "rocm":
            yield Problem(
                ("lmcache", "env", variable), f"has no effect on {recipe.platform}", "remove it", also=(("platform",),)
            )


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def unpinned_model(recipe: Recipe) -> Iterator[Problem]:
    """Warn of a model without a commit: a branch or a tag may mean another commit on the next node, or at the next
    start."""
    revision = recipe.model.revision
    if effective.downloads(recipe) and not _COMMIT.fullmatch(revision or ""):
        yield Problem(
            ("model", "id" if revision is None else "revision"),
            f"revision {revision or 'main'} is not pinned: another start, or another node, may get other weights",
            "set model.revision to a commit (the log of weights-0 names it); nodes are compared after each download",
        )


def unpinned_drafts(recipe: Recipe) -> Iterator[Problem]:
    """Warn of drafts without a pinned revision: with other weights its drafts are refused more often."""
    reported: set[HubModel] = set()
    for name, role in recipe.roles():
        for draft in draft_models(recipe, role):
            if draft in reported or _COMMIT.fullmatch(draft.revision or ""):
                continue
            reported.add(draft)
            flag = SHORT if SHORT in effective.args_of(recipe, role) else SPECULATIVE
            yield Problem(
                flag_path(recipe, name, flag),
                f"revision {draft.revision or 'main'} of the draft model {draft.id} is not pinned: another start, or "
                "another node, may get other weights",
                f"set `revision` in {SPECULATIVE} to a commit (a log of its download names it)",
            )


def lost_weights_cache(recipe: Recipe) -> Iterator[Problem]:
    """Warn of weights that are lost with a container. Inside a container the home is made anew for each run."""
    if recipe.container is None:
        return
    for name, role in recipe.roles():
        if not hub_models(recipe, role):
            continue
        env = {**recipe.container.env, **effective.env_of(recipe, role)}
        if not env.keys() & {*_CACHES} and "download-dir" not in effective.args_of(recipe, role):
            yield Problem(
                ("container",),
                f"the weights of {name} go into the container's own home, and are fetched again at each start",
                "mount a folder (container.mounts) and name it with HF_HOME in container.env",
            )
            return
