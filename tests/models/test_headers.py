"""Headers of safetensors that lie: each is refused, with the file and what is wrong, and before anything is sized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.models import files
from pdserve.models.files import HeaderError, tensors_of
from tests.tables import each_row

WHOLE = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


def written(folder: Path, header: bytes, *, length: int | None = None, data: int = 12) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data))
    return file


@each_row("change, named", [
    ({"dtype": "F12"}, "unknown type 'F12'"),
    ({"dtype": 5}, "a.dtype"), ({"shape": [-5]}, r"a.shape.0"), ({"shape": [1.5]}, r"a.shape.0"),
    ({"shape": "abc"}, "a.shape"), ({"shape": [10**30]}, r"a.shape.0"),
    ({"shape": [1 << 60] * 16}, "has 12 bytes, and its shape"),
    ({"shape": [2, 4]}, "has 12 bytes, and its shape 16"),
    ({"data_offsets": [12, 0]}, "lies at bytes 12 to 0 of 12"),
    ({"data_offsets": [0, 13]}, "lies at bytes 0 to 13 of 12"),
    ({"data_offsets": [0]}, "a.data_offsets"),
])  # fmt: skip
def test_a_tensor_that_cannot_be(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    file = written(tmp_path, json.dumps({"a": {**WHOLE, **change}}).encode())
    with pytest.raises(HeaderError, match=named):
        tensors_of(file)


@each_row("header", [b"[" * 50_000, b"[]", b"55", b'{"a": 1}', b'{"a": {}}', b'{"\xff": 1}', b'{"a', b"9" * 5000])
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(HeaderError, match=r"the header of model\.safetensors cannot be read"):
        tensors_of(written(tmp_path, header))


def test_a_length_beyond_the_file(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match="14 of 99999999 bytes"):
        tensors_of(written(tmp_path, b"{}", length=99_999_999))


def test_the_folder_of_such_a_file_is_refused_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    written(tmp_path, json.dumps({"a": {**WHOLE, "shape": [-5]}}).encode())
    with pytest.raises(PreflightError, match="the weights cannot be sized: the header") as refused:
        files.read_model(tmp_path)
    assert "fetch the model again" in str(refused.value.todo)


@each_row("index", ["{", "{}", '{"weight_map": {"a": [1]}}', '{"weight_map": 5}', "[]", "[" * 50_000])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(PreflightError, match=r"model\.safetensors\.index\.json cannot be read"):
        files.read_model(tmp_path)
