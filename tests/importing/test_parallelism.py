"""The flags of an instance's parallelism: sizes, nodes, load balancing; what a recipe cannot have is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.formats import import_launch
from pdserve.importing.launch import Draft, ImportChoice
from pdserve.operations.import_recipe import import_file
from tests.importing.kit import SCHEMA_1, notes
from tests.importing.kit import read as read_srt
from tests.tables import each_row

NIXL = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"%s"}'"""


def read(flags: str) -> Draft:
    return import_launch(f"vllm serve org/model {flags}\n", "serve.sh", ImportChoice())


def parallel(draft: Draft) -> dict[str, Any]:
    section: dict[str, Any] = draft.document["aggregated"].get("parallel", {})
    return section


def loads(text: str, folder: Path) -> None:
    file = folder / "serve.sh"
    file.write_text(text)
    import_file(file, ImportChoice(), environ={})


@each_row("flag", ["-pcp 2", "--prefill-context-parallel-size 2", "--prefill_context_parallel_size=2"])
def test_the_devices_of_context_parallel_prefills_are_devices_of_the_instance(tmp_path: Path, flag: str) -> None:
    draft = read(f"-tp 2 {flag}")
    assert parallel(draft) == {"tp": 2, "pcp": 2}
    assert "--prefill-context-parallel-size" not in {note.at.key for note in draft.notes}
    loads(f"vllm serve org/model -tp 2 {flag}\n", tmp_path)


def test_context_parallelism_that_a_connector_does_not_have_is_refused_with_its_reason(tmp_path: Path) -> None:
    lines = [f"vllm serve org/model {flags}\n" for flags in (NIXL % "kv_producer", f"-pcp 2 {NIXL % 'kv_consumer'}")]
    with pytest.raises(RecipeError) as caught:
        loads("".join(lines), tmp_path)
    assert "NIXL takes context parallelism in prefills alone" in caught.value.render()


@each_row("flags, expected", [
    ("-dp 4 -dpe --data-parallel-rank $RANK", {"dp": 4, "load_balancing": "external"}),
    ("-dp 4 --data-parallel-external-lb --data-parallel-rank 0", {"dp": 4, "load_balancing": "external"}),
    ("-dp 4 -dpm -dpl 4", {"dp": 4, "load_balancing": "external"}),
    ("-dp 4 --data-parallel-rank 0", {"dp": 4, "load_balancing": "external"}),
    ("-dp 8 -dpl 4 -dph -dpr 0", {"dp": 8, "nodes": 2, "load_balancing": "hybrid"}),
    ("-dp 8 -dpl 4 --data-parallel-start-rank 0", {"dp": 8, "nodes": 2, "load_balancing": "hybrid"}),
    ("-dp 8 --data-parallel-hybrid-lb --nnodes 2", {"dp": 8, "nodes": 2, "load_balancing": "hybrid"}),
    ("-dp 2 -dpl 1 -dph", {"dp": 2, "nodes": 2, "load_balancing": "external"}),
    ("-dp 8 -dpl 4", {"dp": 8}),
    ("-dp 8 -dpl 4 -dpr 4 --headless", {"dp": 8}),
])  # fmt: skip
def test_load_balancing_is_what_vllm_makes_of_the_flags(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    draft = read(flags)
    assert parallel(draft) == expected
    assert draft.losses() == []
    loads(f"vllm serve org/model {flags}\n", tmp_path)


def test_load_balancing_of_srt_slurm_goes_over_the_nodes_of_an_instance() -> None:
    text = SCHEMA_1.replace(
        "data-parallel-size: 4\n", "data-parallel-size: 8\n      data-parallel-hybrid-lb: true\n", 1
    )
    draft = read_srt(text.replace("gpus_per_prefill: 4", "gpus_per_prefill: 8"))
    assert draft.document["prefill"]["parallel"] == {"dp": 8, "ep": True, "nodes": 2, "load_balancing": "hybrid"}
    assert draft.losses() == []


@each_row("flags, effect, why", [
    ("-dpe", "replaced", "there is one data-parallel rank"),
    ("-dp 4 -dpl 4 -dph", "replaced", "on one node that is one API server for all ranks"),
    ("-dp 4 -dph", "served", "set aggregated.parallel.nodes, and aggregated.parallel.load_balancing: hybrid"),
    ("-dp 5 -dpl 2 -dph", "served", "not have over how many nodes"),
])  # fmt: skip
def test_load_balancing_that_a_recipe_cannot_have_is_listed(flags: str, effect: Any, why: str) -> None:
    draft = read(flags)
    assert "load_balancing" not in parallel(draft)
    assert any(why in text for text in notes(draft, effect).values())


@each_row("text", ["auto", "4}", "2.5", "0", "4k", "9" * 5000])
@each_row("flag", ["-tp", "-pp", "-pcp", "-dp"])
def test_a_size_that_is_no_whole_number_is_a_loss_with_its_text(flag: str, text: str) -> None:
    draft = read(f"{flag} '{text}'")
    assert parallel(draft) == {}
    (loss,) = draft.losses()
    assert text[:20] in loss.why
    assert loss.why.endswith("is no number of ranks: 1 is used")
