"""A recipe file -> `LoadedRecipe`: extends, --set and --unset, ${ENV}, validation, rules; every problem with its line.

The only part of this package that reads files. It never reads the process environment: that is an argument.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from pdserve.errors import RecipeError
from pdserve.recipe import rules, secrets
from pdserve.recipe.load import environment, recipe_document, show, yaml12
from pdserve.recipe.load.problems import Origin, Path, did_you_mean, dotted, error, locate, warning
from pdserve.recipe.load.recipe_document import Document
from pdserve.recipe.load.validation import reset_nulls, validate
from pdserve.recipe.model import Recipe, RecipeDocument

_STAND_INS: dict[str, Any] = {
    "schema": 1,
    "name": "x",
    "platform": "cuda",
    "model": {"path": "x", "served_name": "x"},
    "served_name": "x",
    "l1_size_gb": 1,
    "secret": "X",
}
"""Valid values for required keys that are wrong or missing, so that the rules can look at the rest."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and what it was made of."""

    recipe: Recipe
    document: RecipeDocument
    """The resolved document: extends merged, overrides and variables applied. Secrets are references."""
    path: FilePath
    warnings: tuple[str, ...]
    """One line each, with file and line."""
    origins: Mapping[Path, Origin] = field(repr=False)

    def locate(self, dotted: str) -> str:
        """`file.yaml:12` for `prefill.connector`, or the line of its nearest ancestor that is written down; for
        what the command line set, the option."""
        path = tuple(int(part) if part.isdecimal() else part for part in dotted.split(".")) if dotted else ()
        return str(locate(path, self.origins) or Origin(str(self.path)))

    def to_yaml(self, *, model_path: str | None = None) -> str:
        """The resolved document as a recipe of its own, loadable from the same folder; with `model_path`, the
        absolute path of a local model, loadable from anywhere."""
        document = recipe_document.with_absolute_files(self.document, self.path.parent)
        if model_path is not None:
            document = {**document, "model": {**document["model"], "path": model_path}}
        return yaml12.dump(environment.escape(document))


def load_recipe(
    path: FilePath, *, set_: Sequence[str] = (), unset: Sequence[str] = (), environ: Mapping[str, str]
) -> LoadedRecipe:
    """Load the recipe at `path`. Raises RecipeError with everything that is wrong with it."""
    document = recipe_document.read_document(path, lambda text: environment.substitute(text, environ))
    if "hosts" in document.data and "model" not in document.data:
        raise RecipeError(
            "this is a cluster file, not a recipe",
            where=str(document.origins.get(("hosts",), path)),
            todo=f"give it beside a recipe: --cluster {path}",
        )
    apply_overrides(document, set_, unset)
    unresolved = environment.resolve(document, environ)
    recipe_document.locate_resolved(document, unresolved)
    reset_nulls(document.data)
    problems = [*document.problems, *(p for p in secrets.find_literals(document.data) if p.path not in unresolved)]
    spoiled = unresolved.union(*(p.spoils for p in problems))
    recipe, wrong_values = validate(Recipe, document.data, spoiled, _STAND_INS, document.spellings)
    problems += wrong_values
    spoiled = spoiled.union(*(p.spoils for p in wrong_values))
    if recipe is not None and ("platform",) not in spoiled:  # which nearly every rule reads
        problems += [p for p in rules.problems(recipe) if not any(p.concerns(path) for path in spoiled)]
    if problems or recipe is None:
        raise error(problems, document.origins, str(path))
    notes = tuple(warning(p, document.origins, str(path)) for p in rules.warnings(recipe))
    return LoadedRecipe(recipe, document.data, path, notes, document.origins)


_EXAMPLE = "--set name=my-deployment"
"""Of an option that every recipe takes."""


def apply_overrides(document: Document, set_: Sequence[str], unset: Sequence[str]) -> None:
    """Change `document` in place by `--set a.b=c` and `--unset a.b`. RecipeError names the option that is not possible.

    All unsets are applied before all sets, so `--unset model.id --set model.path=x` means the same in any order.
    A value is YAML: `--set prefill.instances=2`, `--set 'lmcache.on=[prefill, decode]'`. A part that is a number is
    the index of a list; a dot inside a key is written `\\.`.
    """
    for text in unset:
        _unset(document, text)
    for text in set_:
        _set(document, text)


def _unset(document: Document, text: str) -> None:
    option = f"--unset {text}"
    path = _path(text, option)
    parent = _walk(document.data, path[:-1], option)
    last = _key(parent, path[-1])
    _step(parent, path, option)
    del parent[last]  # type: ignore[arg-type]
    document.forget(path[:-1] if isinstance(parent, list) else path)
    document.origins[path[:-1]] = Origin(option)


def _set(document: Document, text: str) -> None:
    key, separator, value_text = text.partition("=")
    if not key:
        raise RecipeError(
            "no key is in front of the =" if separator else "an empty option",
            where="--set =..." if len(text) > 100 or show.looks_secret(text) else f"--set {shlex.quote(text)}",
            cause="an option is KEY=VALUE; a variable of the shell that is not set leaves nothing",
            todo=f"write the key and its value, for example `{_EXAMPLE}`, or leave the option out",
        )
    if not separator:
        raise RecipeError(f"--set {key} has no value", todo=f"write --set {key}=VALUE, or --unset {key}")
    path = _path(key, f"--set {key}")
    option = f"--set {key}={value_text}"
    if any(show.secret_name(str(part)) for part in path) or show.looks_secret(value_text) or len(option) > 100:
        option = f"--set {key}=..."
    option = show.escape_invisible(option)
    try:
        parsed = yaml12.parse(value_text, option)
    except RecipeError as refused:
        hidden = any(show.secret_name(str(part)) for part in path)
        raise RecipeError(
            refused.what,
            where=refused.where,
            cause="a value of --set is read as YAML",
            todo=refused.todo,
            evidence=() if hidden else refused.evidence,
        ) from None
    if parsed.problems:
        problem = parsed.problems[0]
        there = replace(problem, path=(*path, *problem.path), origin=Origin(option))
        raise error([there], document.origins, option)
    parent = _create(document, path, option)
    last = _key(parent, path[-1])
    if isinstance(parent, dict):
        parent[str(path[-1])] = parsed.data
        path = (*path[:-1], str(path[-1]))
    elif isinstance(last, int) and last <= len(parent):
        parent[last:] = [parsed.data, *parent[last + 1 :]]
        path = (*path[:-1], last)
    else:
        raise _absent(parent, path, option)
    document.forget(path)
    document.origins[path] = Origin(option)
    document.origins.update({(*path, *below): Origin(option) for below in parsed.origins})
    document.quoted.update((*path, *below) for below in parsed.quoted)
    document.spellings.update({(*path, *below): text for below, text in parsed.spellings.items()})


def _create(document: Document, path: Path, option: str) -> dict[str, Any] | list[Any]:
    """The container of the last part, made of new mappings where nothing is there yet."""
    current: Any = document.data
    for depth, part in enumerate(path[:-1]):
        if isinstance(current, dict) and current.get(str(part)) is None:
            current[str(part)] = {}
            document.origins[path[: depth + 1]] = Origin(option)
        current = _step(current, path[: depth + 1], option)
    if not isinstance(current, dict | list):
        raise _no_keys(path[:-1], current, option)
    return current


def _walk(data: Any, path: Path, option: str) -> dict[str, Any] | list[Any]:
    for depth in range(len(path)):
        data = _step(data, path[: depth + 1], option)
    if not isinstance(data, dict | list):
        raise _no_keys(path, data, option)
    return data


def _step(current: Any, path: Path, option: str) -> Any:
    key = _key(current, path[-1])
    if isinstance(current, dict) and key in current:
        return current[key]
    if isinstance(current, list) and isinstance(key, int) and key < len(current):
        return current[key]
    raise _absent(current, path, option)


def _absent(current: Any, path: Path, option: str) -> RecipeError:
    name = dotted(path)
    if isinstance(current, list):
        return RecipeError(
            f"{name}: the list has {len(current)} items, numbered from 0",
            where=option,
            todo=f"the next item is {dotted((*path[:-1], len(current)))}; --set {dotted(path[:-1])}=[...] gives all",
        )
    if isinstance(current, dict):
        guess = did_you_mean(str(path[-1]), current)
        there = f"{dotted(path[:-1])} has " if path[1:] else "the recipe has "
        known = there + (", ".join(current) or "no keys") + ": leave the option out, or name one of them"
        todo = f"did you mean {dotted((*path[:-1], guess))}?" if guess else known
        return RecipeError(f"{name} is not in the recipe", where=option, todo=todo)
    return _no_keys(path[:-1], current, option)


def _no_keys(path: Path, value: Any, option: str) -> RecipeError:
    what = f"{dotted(path)} is {show.value(value)}, it has no keys"
    return RecipeError(what, where=option, todo=f"change it itself: --set {dotted(path)}=VALUE")


def _key(container: Any, part: str | int) -> str | int:
    return int(part) if isinstance(container, list) and str(part).isdecimal() and len(str(part)) < 6 else str(part)


def _path(text: str, option: str) -> Path:
    parts = [part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", text)]
    if not all(parts):
        todo = f"did you mean {'.'.join(filter(None, parts))}?" if any(parts) else "write a.b.c"
        raise RecipeError(f"{show.value(text)} is not the path of a key", where=option, todo=todo)
    if parts[0] == "extends":
        what = "extends is read before the options of the command line"
        raise RecipeError(what, where=option, todo="write it into the recipe's file")
    return tuple(parts)
