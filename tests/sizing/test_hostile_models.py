"""Model folders whose files lie end `validate` and `plan` in an error of ours, on every architecture: seeded changes.

A failure names its seed and what was changed: the same seed makes the same files.
"""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.commands import command
from pdserve.errors import PdserveError
from tests.models.families import FAMILIES
from tests.models.tiny_configs import TINY
from tests.tables import each_row

CONFIGS: dict[str, dict[str, Any]] = {
    **{family.architecture: {**family.config, "architectures": [family.architecture]} for family in FAMILIES},
    **{tiny.config["architectures"][0]: tiny.config for tiny in TINY},
}
"""One for each architecture; of two the one that has all keys."""
VALUES: tuple[Any, ...] = (
    *("4", "", "\x1b[2J", None, True, [], [4], ["x"], [None] * 3, {}, {"a": 1}, [[[]]]),
    *(-1, -(10**30), 0, 1, 3, 7, 10**7, 10**30, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf")),
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    path = tmp_path / "hostile.yaml"
    path.write_text(
        "schema: 1\nname: h\nplatform: cuda\nmode: aggregated\n"
        "model: {path: model, served_name: m}\naggregated: {instances: 1}\n"
    )
    return path


def ended_well(recipe: Path, verb: str, what: str) -> PdserveError | None:
    """The error of the command; None: it has none."""
    print(what)  # shown where it fails
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            command()([verb, str(recipe)], "pdserve")
        except PdserveError as error:
            failed = error
        except SystemExit:
            return None
    assert failed.todo, f"{what}: no fix: {failed.render()}"
    return failed


def mutated(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One to three values replaced, at the top or in the text config, or an entry of a list."""
    made = json.loads(json.dumps(config))
    for _ in range(chance.randint(1, 3)):
        at = chance.choice([made, *(inner for inner in made.values() if isinstance(inner, dict))])
        key = chance.choice(sorted(at) or ["hidden_size"])
        if isinstance(at.get(key), list) and at[key] and chance.random() < 0.5:
            at[key][chance.randrange(len(at[key]))] = chance.choice(VALUES)
        else:
            at[key] = chance.choice(VALUES)
    return dict(made)


@each_row("architecture", sorted(CONFIGS))
def test_values_of_a_config_that_no_model_has(recipe: Path, architecture: str) -> None:
    chance = random.Random(architecture)
    for number in range(6):
        config = mutated(CONFIGS[architecture], chance)
        (recipe.parent / "model" / "config.json").write_text(json.dumps(config))
        changed = {key: value for key, value in config.items() if value != CONFIGS[architecture].get(key)}
        for verb in ("validate", "plan"):
            ended_well(recipe, verb, f"{verb} of {architecture}, number {number}, {str(changed)[:500]}")
