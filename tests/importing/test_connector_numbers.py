"""Numbers of connectors, which launches write as texts at times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.importing.formats import imported
from pdserve.importing.launch import Draft, ImportChoice
from pdserve.operations.import_recipe import import_file
from tests.importing.kit import notes
from tests.tables import each_row


def script(**extra: Any) -> str:
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return f"vllm serve org/model --kv-transfer-config '{json.dumps(config)}'\n"


def read(**extra: Any) -> Draft:
    return imported(script(**extra), "serve.sh", ImportChoice())


@each_row("size", [107374182400, "107374182400", " 107_374_182_400 ", 107374182400.0])
def test_host_memory_is_what_vllms_int_makes_of_it(tmp_path: Path, size: Any) -> None:
    assert read(cpu_bytes_to_use=size).document["aggregated"]["connector"] == {"kind": "offloading", "cpu_gib": 100}
    file = tmp_path / "serve.sh"
    file.write_text(script(cpu_bytes_to_use=size))
    import_file(file, ImportChoice(), environ={})


def test_other_counts_of_offloading_may_be_texts_too() -> None:
    connector = read(cpu_bytes_to_use=1 << 30, blocks_per_chunk="4", store_threshold="2").document["aggregated"]
    assert connector["connector"] == {"kind": "offloading", "cpu_gib": 1, "blocks_per_chunk": 4, "store_threshold": 2}


@each_row("size", ["100GB", "1e11", "", None, True, [1], {"a": 1}, float("inf"), 10**400, "9" * 5000])
def test_host_memory_that_is_no_number_stays_as_it_is_and_is_listed(size: Any) -> None:
    draft = read(cpu_bytes_to_use=size)
    connector = draft.document["aggregated"]["connector"]
    assert connector["kind"] == "raw"
    assert connector["config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": size}
    (why,) = (why for key, why in notes(draft, "confirm").items() if key.endswith("cpu_bytes_to_use"))
    assert why.endswith("is no number of bytes, and vLLM would not start: correct it")


def test_such_a_size_is_found_inside_a_multi_connector() -> None:
    of = [{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": "80m"}}]
    of.append({"kv_connector": "NixlConnector", "kv_connector_extra_config": {}})
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": of}}
    text = f"vllm serve org/model --kv-transfer-config '{json.dumps(config)}'\n"
    listed = notes(imported(text, "serve.sh", ImportChoice()), "confirm")
    (why,) = (why for key, why in listed.items() if key.endswith("OffloadingConnector.cpu_bytes_to_use"))
    assert why.startswith('"80m" is no number of bytes')
