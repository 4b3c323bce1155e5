"""Where the weights come from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.recipe import effective
from pdserve.recipe.hub_models import SHORT, SPECULATIVE, HubModel, draft_models, hub_models
from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def unpinned(recipe: Recipe) -> Iterator[Problem]:
    """A branch or a tag may mean another commit on the next node, or at the next start."""
    revision = recipe.model.revision
    if effective.downloads(recipe) and not _COMMIT.fullmatch(revision or ""):
        yield Problem(
            ("model", "id" if revision is None else "revision"),
            f"revision {revision or 'main'} is not pinned: another start, or another node, may get other weights",
            "set model.revision to a commit (the log of weights-0 names it); nodes are compared after each download",
        )


def unpinned_drafts(recipe: Recipe) -> Iterator[Problem]:
    """The same for the model that writes drafts: with other weights its drafts are refused more often."""
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


def lost_cache(recipe: Recipe) -> Iterator[Problem]:
    """Inside a container the home is made anew for each run."""
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
