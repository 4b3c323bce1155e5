"""The models that an engine loads from the hub: the recipe's own, and the one that writes drafts for it (speculative
decoding), which vLLM's flags name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdserve.recipe import effective
from pdserve.recipe.model import Recipe, Role

SPECULATIVE = "speculative-config"
SHORT = "spec-model"
"""vLLM's flags that name the model of drafts; the short one takes no revision."""
_DRAFT_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""With an owner: `ngram` and `suffix` are methods without a model."""


class HubModel(NamedTuple):
    """A model of the hub at one revision; None: the main branch."""

    id: str
    revision: str | None


def hub_models(recipe: Recipe, role: Role) -> tuple[HubModel, ...]:
    """What is fetched for the engines of a role before they start, the recipe's model first."""
    own = [HubModel(recipe.model.id or "", recipe.model.revision)] if effective.downloads(recipe) else []
    return tuple(dict.fromkeys([*own, *draft_models(recipe, role)]))


def draft_models(recipe: Recipe, role: Role) -> Iterator[HubModel]:
    """The model of drafts, where it is fetched."""
    if not effective.fetches(recipe):
        return
    args = effective.args_of(recipe, role)
    section = args.get(SPECULATIVE)
    config = dict(section) if isinstance(section, Mapping) else {}
    config |= {flag.partition(".")[2]: value for flag, value in args.items() if flag.startswith(f"{SPECULATIVE}.")}
    config.setdefault("model", args.get(SHORT))
    name, revision = config["model"], config.get("revision")
    if isinstance(name, str) and _DRAFT_ID.fullmatch(name):
        yield HubModel(name, revision if isinstance(revision, str) else None)
