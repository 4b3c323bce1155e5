"""Where a model lies on this machine (a folder, or a snapshot in the hub's cache), and what its files hold.

Reads only, never the network. What is not there is None; what is there and broken is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from pdserve.errors import PreflightError
from pdserve.models import config_json, quantization
from pdserve.models.headers import HeaderError, tensors_of
from pdserve.models.weights import Tensor
from pdserve.weights.files import BrokenIndexError, CacheFolder, weights_in

MAIN = "main"
_LARGEST_CONFIG = 16 << 20
"""Bytes. That of a large model has some ten thousand."""


@dataclass(frozen=True)
class ModelFiles:
    """What a folder holds."""

    folder: Path
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...] | None
    """None: no safetensors are here, or not all of them."""
    file_bytes: int
    """Of the files that vLLM would load; 0 where there are none, or not all of them."""
    lacks: str | None = None
    """What is missing of weights of which some are here."""


def hub_cache(environ: Mapping[str, str], download_dir: str | None = None) -> Path:
    """The hub's cache folder as huggingface_hub finds it. `download_dir`: vLLM's flag."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    if named := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache).expanduser() / "huggingface" / "hub"


def snapshot(cache: Path, model: str, revision: str | None) -> Path | None:
    """The folder of a model of the hub in its cache; None: it is not there."""
    folder = CacheFolder(cache, model)
    commit = folder.commit_of(revision or MAIN)
    return None if commit is None or not folder.snapshot(commit).is_dir() else folder.snapshot(commit)


def config_in(folder: Path) -> dict[str, Any] | None:
    """The content of its config.json, with that of hf_quant_config.json as vLLM adds it; None: there is none that can
    be read, which preflight refuses on the node.

    Raises PreflightError for one whose keys have types that they have in no model.
    """
    file = folder / "config.json"
    if (text := _small(file)) is None:
        return None
    config = config_json.read(text, str(file), f"correct the file, or fetch the model again into {folder}")
    if config is None or (separate := _small(folder / quantization.SEPARATE)) is None:
        return config
    try:
        return quantization.with_separate(config, from_json(separate))
    except ValueError as error:
        raise PreflightError(
            f"{quantization.SEPARATE} cannot be read: {error}",
            where=str(folder / quantization.SEPARATE),
            cause="the file was edited or damaged, or a download was cut off",
            todo=f"correct the file, or fetch the model again into {folder}",
        ) from error


def _small(file: Path) -> bytes | None:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return None
        return file.read_bytes()
    except (OSError, ValueError):
        return None


def read(folder: Path, *, load_format: str = "auto") -> ModelFiles:
    """Everything that is known of a model without its weights. Raises PreflightError."""
    config = config_in(folder)
    if config is None:
        raise PreflightError(
            f"{folder} has no config.json that can be read",
            where="model",
            cause="a wrong path, or a download that has not finished",
            todo="correct model.path, relative to the recipe that names it; of the hub: hf download MODEL_ID",
        )
    try:
        found = weights_in(folder, load_format)
        wanted = found.files
        if found.missing or not wanted:
            return ModelFiles(folder, config, None, 0, found.lack() if wanted else None)
        tensors = None
        if all(name.endswith(".safetensors") for name in wanted):
            tensors = tuple(tensor for name in wanted for tensor in tensors_of(folder / name))
        return ModelFiles(folder, config, tensors, sum((folder / name).stat().st_size for name in wanted))
    except (HeaderError, OSError, BrokenIndexError) as error:
        what = f"{error.file.name} cannot be read" if isinstance(error, BrokenIndexError) else str(error)
        raise PreflightError(
            f"the weights cannot be sized: {what}",
            where=str(folder),
            cause="a download that was cut off, or a file that git-lfs has not fetched",
            todo=f"remove the file and fetch the model again into {folder}",
        ) from error
