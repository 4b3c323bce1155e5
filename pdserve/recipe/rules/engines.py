"""Flags and environment of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.effective import args_of
from pdserve.recipe.flags import ENGINE_FLAGS, env_instead, known_flags, where_instead
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Path, Problem, did_you_mean
from pdserve.recipe.model import Recipe
from pdserve.recipe.vllm_flags import VERSION
from pdserve.recipe.vllm_variables import READ_IN_OTHER_PLACES, VARIABLES

_UTILIZATION = ("gpu-memory-utilization", "device-memory-utilization")


def flags(recipe: Recipe) -> Iterator[Problem]:
    """Flags that pdserve sets itself, and flags that blind it."""
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
    """Flags that pdserve sets itself in some recipes."""
    reported: set[Path] = set()
    for name, role in recipe.roles():
        for flag in args_of(recipe, role):
            owned, path = ENGINE_FLAGS.get(flag), flag_path(recipe, name, flag)
            if owned is None or owned.condition is None or path in reported or not owned.condition.holds(recipe, name):
                continue
            reported.add(path)
            what = f"pdserve sets this flag {owned.condition.text}"
            yield Problem(path, what, owned.instead, also=(owned.condition.path(name),))


def environment(recipe: Recipe) -> Iterator[Problem]:
    """Variables that pdserve sets itself."""
    for section, env in _sections(recipe, "env"):
        for variable in env:
            path = (section, "env", variable)
            if (instead := env_instead(variable, section)) is not None:
                yield Problem(path, "pdserve sets this variable", instead)


def unknown_flags(recipe: Recipe) -> Iterator[Problem]:
    """Flags that the vLLM this was written against does not have."""
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
    """Variables that the vLLM this was written against does not read: it logs a warning, and runs as if they were not
    set. The names of `environment_variables` in its envs.py are in vllm_variables.py."""
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


def utilization(recipe: Recipe) -> Iterator[Problem]:
    """A part of the device's memory, which vLLM refuses only after its imports (`gt=0, le=1` in config/cache.py)."""
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
    """Of a flag's value, a per cent sign or not; 0: it is none."""
    try:
        return float(str(value).strip().removesuffix("%"))
    except ValueError:
        return 0.0


def flag_path(recipe: Recipe, role: str, flag: str) -> Path:
    """Where the flag that counts for `role` is written."""
    section = getattr(recipe, role)
    return (role, "args", flag) if section is not None and flag in section.args else ("engine", "args", flag)


def env_path(recipe: Recipe, role: str, variable: str) -> Path:
    """Where the variable that counts for `role` is written."""
    section = getattr(recipe, role)
    return (role, "env", variable) if section is not None and variable in section.env else ("engine", "env", variable)


def _sections(recipe: Recipe, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    yield "engine", getattr(recipe.engine, key)
    for name, role in recipe.roles():
        yield name, getattr(role, key)
