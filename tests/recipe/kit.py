"""Small recipes for the tests of this folder, and loading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

CPU = """\
schema: 1
name: small
platform: cpu
model:
  path: model
  served_name: small
prefill:
  connector:
    kind: multi
    of:
      - {kind: mooncake, protocol: tcp}
      - {kind: lmcache-mp}
decode:
  connector:
    kind: mooncake
    protocol: tcp
lmcache:
  l1_size_gb: 1
  transfer_mode: auto
"""

GPU = """\
schema: 1
name: large
platform: cuda
devices_per_node: 8
model:
  id: org/model
  served_name: large
prefill:
  parallel: {tp: 4}
decode:
  parallel: {tp: 4}
lmcache:
  l1_size_gb: 100
"""

AGGREGATED = """\
schema: 1
name: whole
platform: cuda
devices_per_node: 8
mode: aggregated
model:
  id: org/model
  served_name: whole
aggregated:
  connector: {kind: lmcache-mp}
lmcache:
  on: [aggregated]
  l1_size_gb: 100
"""


Options = str | tuple[str, ...]
"""Of --set: one, or several."""


def load(
    folder: Path,
    text: str,
    *set_: str,
    unset: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
    name: str = "recipe.yaml",
) -> LoadedRecipe:
    """The recipe with this text, written to `folder`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, set_=set_, unset=unset, environ=environ or {})


def refused(
    folder: Path, text: str, *set_: Options, unset: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> str:
    """What a user reads when the recipe is refused, without the folder's name."""
    options = [option for some in set_ for option in ((some,) if isinstance(some, str) else some)]
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *options, unset=unset, environ=environ)
    return caught.value.render().replace(f"{folder}/", "")
