"""Flags and environment of the engines."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.effective import args_of
from pdserve.recipe.flags import ENGINE_FLAGS, env_instead, known_flags, where_instead
from pdserve.recipe.load.problems import Path, Problem, did_you_mean
from pdserve.recipe.model import Recipe
from pdserve.recipe.vllm_flags import VERSION


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
