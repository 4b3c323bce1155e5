"""How a block of a prompt gets its name, with xxhash and without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import xxhash

from pdserve.pd.routing import block_hash
from pdserve.pd.routing.block_hash import SECRET, digest_without_xxhash
from pdserve.pd.routing.chain import ROOT, GrowingChain
from tests.proxy.rows import each

pytestmark = pytest.mark.process

Digest = Callable[[bytes, int, int, int], int]

SMALL = b"You are a helpful assistant."
LARGE = SMALL * 100


def digest(data: bytes, begin: int, end: int, before: int) -> int:
    return block_hash.digest(data, memoryview(data), begin, end, before)


DIGESTS = each("name_of", [digest, digest_without_xxhash])
TEXTS = each("text", [SMALL, LARGE])
WITHOUT = """
import sys
sys.modules["xxhash"] = None
from pdserve.pd.routing.block_hash import digest, digest_without_xxhash
from pdserve.pd.routing.chain import GrowingChain
text = b"You are a helpful assistant." * 100
assert digest(text, memoryview(text), 7, 2000, 3) == digest_without_xxhash(text, 7, 2000, 3)
assert len(GrowingChain(text, 256).names) == 10
"""


@TEXTS
def test_xxhash_is_taken_where_it_is_installed(text: bytes) -> None:
    assert digest(text, 0, len(text), SECRET) == xxhash.xxh3_64_intdigest(text, SECRET)


def test_without_it_python_hashes() -> None:
    """In a process of its own: what a module has at its beginning stays, where it is compiled."""
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


@TEXTS
def test_pythons_own_hash_is_that_of_the_bytes_and_of_what_is_before(text: bytes) -> None:
    assert digest_without_xxhash(text, 0, len(text), SECRET) == hash((SECRET, text))


@DIGESTS
@TEXTS
def test_the_name_is_that_of_the_bytes_wherever_they_are(text: bytes, name_of: Digest) -> None:
    assert name_of(b"{" + text + b"}", 1, 1 + len(text), SECRET) == name_of(text, 0, len(text), SECRET)


@DIGESTS
@TEXTS
def test_it_depends_on_each_byte_and_on_what_is_before(text: bytes, name_of: Digest) -> None:
    name = name_of(text, 0, len(text), SECRET)
    assert name != name_of(text[:-1] + b"!", 0, len(text), SECRET)
    assert name != name_of(text, 0, len(text), name)


def test_the_names_of_a_prompt_begin_with_the_secret() -> None:
    assert GrowingChain(LARGE, 256).names[0] == digest(LARGE, 0, 256, SECRET) != digest(LARGE, 0, 256, ROOT)
