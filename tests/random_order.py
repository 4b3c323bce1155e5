"""Runs the tests in a random order (`-p tests.random_order --random-order SEED`), which no test may depend on.

Every test may come after every other one, but those of a module that share a fixture come together: they are shuffled
among themselves. One that ends what such a fixture has made is marked `ends_fixture` and comes after them. With
pytest-xdist's `loadfile`, modules come in the order of their first tests.
"""

from __future__ import annotations

import random

import pytest

_SHARED = ("module", "package")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order", type=int, metavar="SEED", help="shuffle the tests; the same seed, the same order"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("random_order")
    return None if seed is None else f"random order: --random-order {seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("random_order")
    if seed is not None:
        items[:] = shuffled(items, seed)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """In an order that the seed and the names decide."""
    order = random.Random(seed)
    blocks: dict[str, list[pytest.Item]] = {}
    sharing = {item.path for item in items if _shares(item)}
    for item in items:
        blocks.setdefault(str(item.path) if item.path in sharing else item.nodeid, []).append(item)
    mixed = list(blocks.values())
    order.shuffle(mixed)
    for block in mixed:
        order.shuffle(block)
        block.sort(key=lambda item: item.get_closest_marker("ends_fixture") is not None)
    return [item for block in mixed for item in block]


def _shares(item: pytest.Item) -> bool:
    """Whether it uses a fixture that its module makes once."""
    info = getattr(item, "_fixtureinfo", None)
    definitions = () if info is None else info.name2fixturedefs.values()
    return any(definition.scope in _SHARED for many in definitions for definition in many)
