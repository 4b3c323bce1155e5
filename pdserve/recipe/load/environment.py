"""`${NAME}` and `${NAME:-default}` in the values of a recipe.

A value that is one reference and nothing else is typed by YAML's rules where the key takes no text, so that
`tp: ${TP}` is a number and `served_name: ${NAME}` is always text. Where a key takes both (flags), quotes make it
text. An empty variable counts as unset. `$${` is a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pdserve.recipe.load import show, yaml12
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.load.recipe_document import Document
from pdserve.recipe.load.shape import RECIPE, Shape

_TOKEN = re.compile(r"\$\$\{|\$\{")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")


class UnresolvedError(ValueError):
    """A reference that has no value, and what to do."""

    def __init__(self, what: str, todo: str | None = None) -> None:
        super().__init__(f"{what}: {todo}" if todo else what)
        self.what = what
        self.todo = todo


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """`text` with its references replaced. Raises ValueError that names the one that cannot be."""
    done: list[str] = []
    position = 0
    while token := _TOKEN.search(text, position):
        done.append(text[position : token.start()])
        if token.group() == "$${":
            done.append("${")
            position = token.end()
            continue
        reference = _REFERENCE.match(text, token.start())
        if reference is None:
            raise UnresolvedError(
                f"{show.value(text[token.start() :])} is not a reference",
                "write ${NAME} or ${NAME:-default}, or $${ for a literal ${",
            )
        done.append(_resolve(reference, environ))
        position = reference.end()
    done.append(text[position:])
    return "".join(done)


def resolve(document: Document, environ: Mapping[str, str], shape: Shape = RECIPE) -> set[Path]:
    """Replace every reference in the values of `document`, in place. Returns the paths where that failed; the reasons
    are added to the document's problems."""
    failed: set[Path] = set()

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            text = substitute(value, environ)
            result = yaml12.scalar(text) if _takes_text(value, path, document, shape) else text
            if "\0" in text:
                raise ValueError("the variable contains a NUL character")
            text.encode()
        except UnicodeEncodeError:
            document.problems.append(Problem(path, "the variable is not UTF-8 text"))
        except UnresolvedError as error:
            document.problems.append(Problem(path, error.what, error.todo))
        except ValueError as error:
            document.problems.append(Problem(path, str(error)))
        else:
            document.spellings[path] = value
            return result
        failed.add(path)
        return value

    document.data = walk(document.data, ())
    return failed


def _takes_text(value: str, path: Path, document: Document, shape: Shape) -> bool:
    if _REFERENCE.fullmatch(value) is None:
        return False
    text, other = shape.scalars_at(path, document.data)
    return path not in document.quoted if text == other else other


def escape(data: Any) -> Any:
    """`data` with every literal `${` written so that it is read back as it is."""
    if isinstance(data, dict):
        return {key: escape(item) for key, item in data.items()}
    if isinstance(data, list):
        return [escape(item) for item in data]
    return data.replace("${", "$${") if isinstance(data, str) else data


def _resolve(reference: re.Match[str], environ: Mapping[str, str]) -> str:
    name, default = reference.group(1), reference.group(2)
    if show.secret_name(name):
        raise UnresolvedError(
            f"${{{name}}} looks like a secret, and values are saved and logged",
            f"only env may hold secrets, as {{secret: {name}}}",
        )
    value = environ.get(name, "")
    if value:
        return value
    if default is not None:
        return default
    state = "is empty" if name in environ else "is not set"
    raise UnresolvedError(f"the environment variable {name} {state}", f"set it, or write ${{{name}:-default}}")
