"""A model's files on this machine: a folder, a snapshot of the hub's cache, headers of weights; and broken ones."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.models import files
from pdserve.models.files import HeaderError, tensors_of
from pdserve.models.weights import Tensor
from tests.tables import each_row

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def safetensors(path: Path, tensors: dict[str, Any]) -> Path:
    """A file with a header, and a hole for the data of all of them: nothing of that is read."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + max(about["data_offsets"][1] for about in tensors.values()))
    return path


def tensor(*shape: int) -> dict[str, Any]:
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 2 * math.prod(shape)]}


def test_tensors_by_the_header(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "model.safetensors", {"a.weight": tensor(2, 3)})
    assert tensors_of(file) == [Tensor("a.weight", "BF16", (2, 3))]


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    first = safetensors(tmp_path / "model-1.safetensors", {"a": tensor(1)})
    second = safetensors(tmp_path / "model-2.safetensors", {"b": tensor(1)})
    index = {"weight_map": {"a": first.name, "b": second.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = files.read_model(tmp_path)
    assert model.config == {"model_type": "llama"}
    assert [made.name for made in model.tensors or ()] == ["a", "b"]
    assert model.file_bytes == first.stat().st_size + second.stat().st_size


def test_the_quantization_that_modelopt_wrote_beside_config_json(tmp_path: Path) -> None:
    separate = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(separate))
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert files.config_in(tmp_path) == {"quantization_config": separate}
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert files.config_in(tmp_path) == {"quantization_config": {}}, "vLLM does not look further"


def test_weights_that_are_not_all_there_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = safetensors(tmp_path / "model-1.safetensors", {"a": tensor(1)})
    index = {"weight_map": {"a": first.name, "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = files.read_model(tmp_path)
    assert (model.tensors, model.file_bytes, model.lacks) == (None, 0, "model-2.safetensors")


@each_row("config", [None, "{", "[]"])
def test_without_a_config_it_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(PreflightError, match=r"no config\.json that can be read"):
        files.read_model(tmp_path)


def test_dummy_weights_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors", {"a": tensor(1)})
    assert files.read_model(tmp_path, load_format="dummy").tensors is None


@each_row("environ, download_dir, expected", [
    ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, None, "/a"),
    ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, None, "/a"),
    ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, None, "/b/hub"),
    ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, None, "/c/huggingface/hub"),
    ({"HOME": "/d"}, None, "/d/.cache/huggingface/hub"),
    ({"HF_HOME": "/b"}, "/e", "/e"),
])  # fmt: skip
def test_where_the_hubs_cache_is(environ: dict[str, str], download_dir: str | None, expected: str) -> None:
    assert files.hub_cache(environ, download_dir) == Path(expected)


def test_a_snapshot_by_revision(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    assert files.cached_snapshot(tmp_path, "org/name", None) == folder / "snapshots" / COMMIT
    assert files.cached_snapshot(tmp_path, "org/name", COMMIT) == folder / "snapshots" / COMMIT
    assert files.cached_snapshot(tmp_path, "org/name", "v2") is None
    assert files.cached_snapshot(tmp_path, "org/other", None) is None


WHOLE = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


def written(folder: Path, header: bytes, *, length: int | None = None) -> Path:
    """A file whose header claims that length, before 12 bytes of data."""
    file = folder / "model.safetensors"
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(12))
    return file


@each_row("change, named", [
    ({"dtype": "F12"}, "unknown type 'F12'"),
    ({"dtype": 5}, "a.dtype"), ({"shape": [-5]}, r"a.shape.0"), ({"shape": "abc"}, "a.shape"),
    ({"shape": [1 << 60] * 16}, "has 12 bytes, and its shape"),
    ({"data_offsets": [12, 0]}, "lies at bytes 12 to 0 of 12"),
    ({"data_offsets": [0, 13]}, "lies at bytes 0 to 13 of 12"),
])  # fmt: skip
def test_a_tensor_that_cannot_be(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    file = written(tmp_path, json.dumps({"a": {**WHOLE, **change}}).encode())
    with pytest.raises(HeaderError, match=named):
        tensors_of(file)


@each_row("header, length, why", [
    (b"[" * 50_000, None, "cannot be read"), (b"[]", None, "cannot be read"), (b'{"a": 1}', None, "cannot be read"),
    (b'{"\xff": 1}', None, "cannot be read"), (b"9" * 5000, None, "cannot be read"),
    (b"{}", 99_999_999, "14 of 99999999 bytes"),
])  # fmt: skip
def test_a_header_that_is_none_is_refused_with_a_fix(
    tmp_path: Path, header: bytes, length: int | None, why: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    written(tmp_path, header, length=length)
    with pytest.raises(PreflightError, match=why) as refused:
        files.read_model(tmp_path)
    assert refused.value.what.startswith("the weights cannot be sized: ")
    assert "fetch the model again" in str(refused.value.todo)


@each_row("name, content", [
    ("model.safetensors.index.json", "{"), ("model.safetensors.index.json", '{"weight_map": {"a": [1]}}'),
    ("model.safetensors.index.json", "[" * 50_000), ("hf_quant_config.json", "{"),
])  # fmt: skip
def test_a_broken_file_beside_config_json_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(PreflightError, match=rf"{name} cannot be read") as refused:
        files.read_model(tmp_path)
    assert refused.value.todo is not None
