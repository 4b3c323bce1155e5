"""One file of srt-slurm with several deployments."""

from __future__ import annotations

import textwrap

from tests.importing.kit import SCHEMA_1, read, refused
from tests.tables import each_row

BASE = f"base:\n{textwrap.indent(SCHEMA_1, '  ')}"
OVERRIDE = """\
override_small:
  name: other
  backend:
    vllm_config:
      decode:
        max-num-seqs: 8
        max-model-len: null
      prefill:
        max-model-len: null
"""
ZIP = """\
zip_override_seqs:
  backend:
    vllm_config:
      decode:
        max-num-seqs: [16, 32]
        block-size: [128]
        cudagraph-capture-sizes: [[1, 2], [4]]
"""


def decode(text: str, variant: str | None) -> object:
    return read(text, variant).document["decode"]["args"]


def test_an_override_is_laid_over_the_base_and_null_removes() -> None:
    draft = read(BASE + OVERRIDE, "override_small")
    assert draft.document["name"] == "other"
    assert draft.document["decode"]["args"] == {"max-num-seqs": 8}
    line = (BASE + OVERRIDE).splitlines().index("        max-num-seqs: 8") + 1
    assert draft.origins["decode", "args", "max-num-seqs"].startswith(f"{line}: ")


@each_row("index, seqs, sizes", [(0, 16, [1, 2]), (1, 32, [4])])
def test_lists_of_a_zip_override_are_walked_side_by_side(index: int, seqs: int, sizes: list[int]) -> None:
    args = decode(BASE + ZIP, f"zip_override_seqs[{index}]")
    assert args == {"max-num-seqs": seqs, "max-model-len": 4096, "block-size": 128, "cudagraph-capture-sizes": sizes}


def test_a_file_with_several_deployments_asks_for_one_and_names_them() -> None:
    error = refused(BASE + OVERRIDE + ZIP)
    assert error.todo is not None
    for name in ("base", "override_small", "zip_override_seqs[0]", "zip_override_seqs[1]"):
        assert name in error.todo
    assert "no variant" in refused(BASE, "override_other").what


def test_variants_that_serve_the_same_need_no_choice() -> None:
    assert decode(BASE + "override_bench:\n  benchmark: {isl: 8192}\n", None) == decode(SCHEMA_1, None)


def test_a_sweep_fills_its_placeholders_in_every_combination() -> None:
    text = SCHEMA_1.replace("max-num-seqs: 64", 'max-num-seqs: "{seqs}"') + "sweep: {seqs: [4, 8], isl: [1]}\n"
    assert "seqs=4,isl=1" in str(refused(text).todo)
    assert decode(text, "seqs=8,isl=1") == {"max-model-len": 4096, "max-num-seqs": 8}
