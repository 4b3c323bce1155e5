"""How a block of a prompt gets its name, with xxhash and without."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pdserve.pd.routing.block_hash import SECRET, digest, fastest

Digest = Callable[[bytes | memoryview, int], int]
TEXT = b"You are a helpful assistant." * 100


@pytest.fixture(params=["xxhash", "python"])
def hasher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digest:
    if request.param == "python":
        monkeypatch.setitem(sys.modules, "xxhash", None)
    return fastest()


def test_xxhash_is_taken_where_it_is_installed() -> None:
    xxhash = pytest.importorskip("xxhash")
    assert digest(TEXT, SECRET) == xxhash.xxh3_64_intdigest(TEXT, SECRET)


def test_without_it_python_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert fastest()(TEXT, SECRET) == hash((SECRET, TEXT))


def test_the_name_is_that_of_the_bytes_wherever_they_are(hasher: Digest) -> None:
    assert hasher(memoryview(b"{" + TEXT + b"}")[1:-1], SECRET) == hasher(TEXT, SECRET)


def test_a_name_depends_on_what_is_before(hasher: Digest) -> None:
    assert hasher(TEXT, SECRET) != hasher(TEXT, hasher(TEXT, SECRET))


def test_one_byte_makes_another_name(hasher: Digest) -> None:
    assert hasher(TEXT[:-1] + b"!", SECRET) != hasher(TEXT, SECRET)
