"""How a block of a prompt gets its name, with xxhash and without."""

from __future__ import annotations

import pytest
import xxhash

from pdserve.pd.routing import block_hash
from pdserve.pd.routing.block_hash import SECRET, digest
from pdserve.pd.routing.chain import ROOT, GrowingChain

SMALL = b"You are a helpful assistant."
LARGE = SMALL * 100


@pytest.fixture(params=["xxhash", "python"])
def hasher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(block_hash, "_XXH3", None)


@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_xxhash_is_taken_where_it_is_installed(text: bytes) -> None:
    assert digest(text, 0, len(text), SECRET) == xxhash.xxh3_64_intdigest(text, SECRET)


@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_without_it_python_hashes(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(block_hash, "_XXH3", None)
    assert digest(text, 0, len(text), SECRET) == hash((SECRET, text))


@pytest.mark.usefixtures("hasher")
@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_the_name_is_that_of_the_bytes_wherever_they_are(text: bytes) -> None:
    assert digest(b"{" + text + b"}", 1, 1 + len(text), SECRET) == digest(text, 0, len(text), SECRET)


@pytest.mark.usefixtures("hasher")
@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_it_depends_on_each_byte_and_on_what_is_before(text: bytes) -> None:
    name = digest(text, 0, len(text), SECRET)
    assert name != digest(text[:-1] + b"!", 0, len(text), SECRET)
    assert name != digest(text, 0, len(text), name)


@pytest.mark.usefixtures("hasher")
def test_the_names_of_a_prompt_begin_with_the_secret() -> None:
    assert GrowingChain(LARGE, 256).names[0] == digest(LARGE, 0, 256, SECRET) != digest(LARGE, 0, 256, ROOT)
