"""How a patch takes hold of its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.errors import StartError
from pdserve.patches.wrap import wrap


def doubled(original: Callable[..., int]) -> Callable[..., int]:
    def add(self: object, amount: int, times: int = 1) -> int:
        return original(self, amount * 2, times)

    return add


def make_target() -> Any:
    class Target:
        def __init__(self) -> None:
            self.total = 0

        def add(self, amount: int, times: int = 1) -> int:
            """Upstream's words."""
            self.total += amount * times
            return self.total

    return Target


def test_the_original_is_called_with_what_the_wrapper_lets_through() -> None:
    target = make_target()
    wrap(target, "add", patch="double", around=doubled)
    instance = target()
    assert instance.add(3, times=2) == 12
    assert target.add.__doc__ == "Upstream's words."


def test_a_second_application_changes_nothing() -> None:
    target = make_target()
    for _ in range(3):
        wrap(target, "add", patch="double", around=doubled)
    assert target().add(1) == 2


def test_two_patches_may_share_a_target_each_of_them_once() -> None:
    target = make_target()
    for patch in ("double", "again", "double"):
        wrap(target, "add", patch=patch, around=doubled)
    assert target().add(1) == 4


def test_a_target_that_is_gone_is_refused() -> None:
    with pytest.raises(StartError, match=r"Target\.subtract does not exist"):
        wrap(make_target(), "subtract", patch="double", around=doubled)
