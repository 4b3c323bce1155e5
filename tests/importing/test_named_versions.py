"""The versions that a launch file names, and what is known of them for the recipe that it becomes."""

from __future__ import annotations

from pathlib import Path

from pdserve.importing.formats import named_versions
from pdserve.importing.launch import Launch, SourcedValue
from pdserve.operations.import_recipe import version_hazards
from tests.importing.kit import NIXL, SCHEMA_1, whole
from tests.messages.kit import run
from tests.tables import each_row

MULTI = (
    '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": '
    '[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_connector": "OffloadingConnector", "kv_role": '
    '"kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}]}}'
)

WITH_MULTI = SCHEMA_1.replace(NIXL, MULTI).replace("      no-enable-prefix-caching: true\n", "")


def named(image: str | None = None, text: str = "") -> dict[str, str]:
    at = SourcedValue("small", "name", 1)
    launch = Launch("launch.yaml", "srt-slurm, schema 1", at, at.of("cuda"))
    launch.image = None if image is None else SourcedValue(image, "model.container", 3)
    return {package: str(found.value) for package, found in named_versions(launch, text).items()}


@each_row("image, versions", [
    ("vllm/vllm-openai:v0.20.1-ubuntu2404", {"vllm": "0.20.1"}),
    ("vllm/vllm-openai:v0.33.0rc2", {"vllm": "0.33.0rc2"}),
    ("docker.io/vllm/vllm-openai-rocm:v0.31.0@sha256:00", {"vllm": "0.31.0"}),
    ("rocm/vllm:rocm7.0.2_vllm_0.29.0_20261004", {"vllm": "0.29.0"}),
    ("lmcache/vllm-openai:v0.5.4", {"lmcache": "0.5.4"}),
    ("registry.example:5000/vllm/vllm-openai:v0.32.0", {"vllm": "0.32.0"}),
])  # fmt: skip
def test_an_image_of_a_release_names_it(image: str, versions: dict[str, str]) -> None:
    assert named(image) == versions


@each_row("image", [
    "vllm/vllm-openai:nightly-5e35a6f4f9bbc217c599692157ca985c894373f7",
    "vllm/vllm-openai:latest",
    "vllm/vllm-openai:minimax-m3-perf-arm64-13.0.1-7a67223",
    "example/other:v0.20.1", "nvcr.io/nvidia/vllm:25.09.1-py3", "vllm-stable", "", ":", "lmcache/",
])  # fmt: skip
def test_no_version_is_read_into_another_tag(image: str) -> None:
    assert named(image) == {}


def test_what_a_file_installs_is_named_and_a_comment_is_not() -> None:
    text = (
        "# pip install vllm==0.21.0\nuv pip install lmcache==0.5.4 'mooncake-transfer-engine-non-cuda==0.3.11.post1'\n"
    )
    assert named(text=text) == {"lmcache": "0.5.4", "mooncake": "0.3.11.post1"}


def test_the_listed_contents_of_an_image_win(tmp_path: Path) -> None:
    listed = 'identity:\n  frameworks:\n    dynamo: "1.2.0"\n    vllm: "0.26.1rc1.dev255+g5e35a6f4f"\n'
    recipe = whole(SCHEMA_1.replace("registry.example/vllm:v1", "vllm/vllm-openai:v0.24.0") + listed, tmp_path)
    [(package, at)] = recipe.draft.versions.items()
    assert (package, at.value, at.key) == ("vllm", "0.26.1rc1.dev255+g5e35a6f4f", "identity.frameworks.vllm")


# --- what is known of them


FAULTY, LATER = "vllm/vllm-openai:v0.25.1", "vllm/vllm-openai:v0.32.0"


@each_row("image, launch, said, unsaid", [
    (FAULTY, WITH_MULTI, "the file names vllm 0.25.1 (line 4, model.container): vllm 0.25.1: MultiCon", "no flag"),
    (LATER, WITH_MULTI, "", "the file names"),
    ("vllm/vllm-openai:v0.20.1-ubuntu2404", SCHEMA_1, "outside what is known", "46865"),
    ("vllm/vllm-openai:v0.26.0", SCHEMA_1.replace("max-num-seqs: 64", "enable-fault-tolerance: true"),
     "decode.args.enable-fault-tolerance: vllm 0.26.0 has no flag enable-fault-tolerance", "46865"),
])  # fmt: skip
def test_what_is_known_of_the_named_version_is_said_where_the_recipe_meets_it(
    tmp_path: Path, image: str, launch: str, said: str, unsaid: str
) -> None:
    found = "\n".join(version_hazards(whole(launch.replace("registry.example/vllm:v1", image), tmp_path)))
    assert said in found
    assert unsaid not in found


def test_import_prints_it_and_ends_as_before(tmp_path: Path) -> None:
    text = WITH_MULTI.replace("registry.example/vllm:v1", "vllm/vllm-openai:v0.25.1")
    (tmp_path / "launch.yaml").write_text(text)
    done = run(("import", "launch.yaml"), tmp_path, {})
    assert done.code == 0
    assert "warning: the file names vllm 0.25.1 (line" in done.err
    assert "vllm#46865" in done.err
    assert "pdserve refuses the start" in done.err
    assert "vllm#46865" not in done.out
