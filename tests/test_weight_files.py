"""Which files of a model vLLM loads, and which of them a folder lacks, as far as it is known without the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.weights import BrokenIndexError, indexed_files, weight_files, weights_in
from tests.tables import each_row

FIRST = "model-00001-of-00003.safetensors"


def folder_with(folder: Path, *names: str, **indexes: Sequence[str]) -> Path:
    """`indexes`: `model`, `consolidated` or `pytorch_model` -> the files that its index names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *names):
        (folder / name).write_text("{}")
    for kind, named in indexes.items():
        end = "bin" if kind == "pytorch_model" else "safetensors"
        content = {"weight_map": dict(zip("abcdef", named, strict=False))}
        (folder / f"{kind}.{end}.index.json").write_text(json.dumps(content))
    return folder


@each_row("load_format, files, expected", [
    ("auto", ["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
    ("auto", ["model.safetensors", "consolidated.safetensors"], ["consolidated.safetensors"]),
    ("hf", ["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
    ("hf", ["pytorch_model.bin"], ["pytorch_model.bin"]),
    ("hf", ["model.pt"], ["model.pt"]),
    ("hf", ["consolidated.safetensors", "model.safetensors"], ["consolidated.safetensors", "model.safetensors"]),
    ("HF", ["pytorch_model.bin"], ["pytorch_model.bin"]),
    ("safetensors", ["pytorch_model.bin"], []),
    ("fastsafetensors", ["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
    ("npcache", ["model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
    ("npcache", ["model.pt"], ["model.pt"]),
    ("pt", ["model.pt", "pytorch_model.bin"], ["model.pt"]),
    ("auto", ["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
    ("auto", ["training_args.bin"], []), ("dummy", ["model.safetensors"], []),
])  # fmt: skip
def test_the_load_format_decides_which_files(load_format: str, files: list[str], expected: list[str]) -> None:
    """As in vLLM 0.32: _prepare_weights of model_executor/model_loader/default_loader.py."""
    assert weight_files(files, load_format, []) == expected


@each_row("load_format", ["auto", "mistral"])
def test_shards_of_mistral_are_those_of_mistrals_index(tmp_path: Path, load_format: str) -> None:
    names = [f"consolidated-0000{number}-of-00002.safetensors" for number in (1, 2)]
    folder = folder_with(tmp_path, names[0], "model.safetensors", consolidated=names, model=["model.safetensors"])
    assert weights_in(folder, load_format).lack() == names[1]
    (folder / names[1]).write_text("")
    assert weights_in(folder, load_format) == (names, [])


def test_shards_of_bin_are_those_of_their_index(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    folder = folder_with(tmp_path, names[0], pytorch_model=names)
    assert weights_in(folder, "auto").lack() == names[1]
    assert weights_in(folder_with(tmp_path, *names), "auto").lack() is None


@each_row("index", [["gone-1.bin", "gone-2.bin"], None])
def test_an_index_of_bin_that_vllm_does_not_need_forbids_nothing(tmp_path: Path, index: list[str] | None) -> None:
    folder = folder_with(tmp_path, "pytorch_model.bin", pytorch_model=index or [])
    if index is None:
        (folder / "pytorch_model.bin.index.json").write_text("{")
    assert weights_in(folder, "auto") == (["pytorch_model.bin"], [])


@each_row("there, lacks", [
    ([FIRST], "model-00002-of-00003.safetensors and 1 other files of weights"),
    (["model-00003-of-00003.safetensors", FIRST], "model-00002-of-00003.safetensors"),
    (["pytorch_model-00001-of-00002.bin"], "pytorch_model-00002-of-00002.bin"),
    (["consolidated-00002-of-00002.safetensors"], "consolidated-00001-of-00002.safetensors"),
    (["model-00002-of-000002.safetensors"], "model-00001-of-000002.safetensors"),
    (["model-00000-of-00002.safetensors"], "model-00001-of-00002.safetensors"),
    (["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"], None),
    (["model-00001-of-00001.safetensors"], None),
    (["model-1-of-999999999.safetensors"], None),
    (["model.safetensors"], None), (["tokenizer.model"], "the weights"),
])  # fmt: skip
def test_without_an_index_all_shards_of_a_set_are_demanded(tmp_path: Path, there: list[str], lacks: str | None) -> None:
    assert weights_in(folder_with(tmp_path, *there), "auto").lack() == lacks


def test_what_an_index_leaves_out_is_not_demanded(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "model-1.safetensors", FIRST, model=["model-1.safetensors"])
    assert weights_in(folder, "auto") == (["model-1.safetensors"], [])


def test_files_below_the_folder_are_no_weights(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "model.safetensors")
    folder_with(folder / "onnx", "model.safetensors")
    assert weights_in(folder, "auto").files == ["model.safetensors"]


@each_row("content", [b"{", b"\xff", b"[]", b"{}", b'{"weight_map": {"a": 1}}', b"[" * 100_000])
def test_a_broken_index_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(BrokenIndexError, match=r"model\.safetensors\.index\.json is no index of weights"):
        indexed_files(tmp_path)
