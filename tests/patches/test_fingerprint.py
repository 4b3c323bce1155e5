"""What makes two pieces of upstream code the same to a patch."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.patches.fingerprint import Fingerprint, known_fingerprints, of_loaded, of_source, of_tree
from tests.tables import each_row

BODY = """
def observe(self, data, engine_idx=0):
    for name, stats in data.items():
        self.metrics[name].observe(stats, engine_idx)
"""
SAME = [
    '''
async_ = 1
def observe(self, data: dict[str, int], engine_idx: int = 0) -> None:
    """Words."""
    # more words
    for name, stats in data.items():
        self.metrics[name].observe(
            stats,
            engine_idx,
        )
''',
    """
    def observe(self, data: "dict", engine_idx=0):
        for name, stats in data.items(): self.metrics[name].observe(stats, engine_idx)
""",
]
OTHER = [
    BODY.replace("engine_idx)", "0)"),
    BODY.replace("    for", "    assert data\n    for"),
    BODY.replace("def ", "async def "),
    "@staticmethod" + BODY,
]


def test_what_the_code_does_counts_and_words_annotations_and_layout_do_not() -> None:
    assert {of_source(text) for text in SAME} == {of_source(BODY)}
    assert of_source(BODY).code not in {of_source(text).code for text in OTHER}


def test_the_signature_has_names_kinds_and_defaults_or_the_bases_of_a_class() -> None:
    text = "def f(a: int, /, b: str = 'x', *rest: int, c: bool | None = None, **more: int) -> list[int]: ..."
    assert of_source(text).signature == "(a, /, b='x', *rest, c=None, **more)"
    first = of_source("class A(Base, Mixin):\n    x: int = 1\n    def f(self): return 1")
    assert first.signature == "(Base, Mixin)"
    assert first.code != of_source("class A(Base, Mixin):\n    x: int = 1\n    def f(self): return 2").code


def test_the_same_code_is_the_same_loaded_and_in_a_folder_of_sources() -> None:
    name = "pdserve.patches.verdict.judge"
    root = Path(__file__).parents[2]
    assert of_loaded(name) == of_tree(name, root)
    assert of_loaded(name) is not None


def test_code_under_a_condition_is_found_in_a_folder_of_sources(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "up/__init__.py").write_text(
        "try:\n    import nothing\nexcept ImportError:\n    class A:\n        def f(self): ..."
    )
    assert of_tree("up.A.f", tmp_path) == Fingerprint("(self)", of_source("def f(self): ...").code)


@each_row("name", ["pdserve.patches.verdict.gone", "pdserve.gone.f", "gone_altogether.f"])
def test_what_is_not_there_has_no_fingerprint(name: str) -> None:
    assert of_loaded(name) is None
    assert of_tree(name, Path(__file__).parents[2]) is None


def test_an_upstream_module_that_cannot_be_imported_is_not_taken_for_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_upstream.py").write_text("import something_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing"):
        of_loaded("broken_upstream.f")


def test_every_target_of_the_registry_is_in_the_shipped_table() -> None:
    from pdserve.patches.registry import REGISTRY

    missing = {t.name for patch in REGISTRY for t in patch.targets} - known_fingerprints().keys()
    assert not missing, "run python -m tests.upstream.fingerprints"
