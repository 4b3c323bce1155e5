"""A model on this machine (a folder, or a snapshot in the hub's cache), and its config.json at the hub.

What is not there is None; what is there and broken is an error. Only `fetch_config` asks the network, with --online. Of
weights the safetensors headers are read: eight bytes of length, then JSON
(https://huggingface.co/docs/safetensors/index#format). The library safetensors wants torch or numpy for it, and
huggingface_hub is the engines', not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from pdserve.errors import PreflightError
from pdserve.models import config_json
from pdserve.models.weights import BITS, Tensor
from pdserve.weights import COMMIT, BrokenIndexError, CacheFolder, configuration_files, weights_in

if TYPE_CHECKING:
    import httpx


_LENGTH = 8
_LARGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors itself accepts."""
_METADATA = "__metadata__"

_Number = Annotated[int, Field(ge=0, le=1 << 60)]


class HeaderError(Exception):
    """The file is no safetensors file, or is not there in full. The message is a clause: why."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)

    dtype: str
    shape: Annotated[list[_Number], Field(max_length=16)]
    data_offsets: Annotated[list[_Number], Field(min_length=2, max_length=2)]


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[Annotated[str, Field(max_length=2000)], _Entry])


def tensors_of(file: Path) -> list[Tensor]:
    """Return the tensors of a file. Raises HeaderError, or OSError where it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if not 1 < length <= _LARGEST_HEADER:
            raise HeaderError(f"{file.name} does not begin with a header of safetensors")
        if _LENGTH + length > size:
            raise HeaderError(f"the header of {file.name} cannot be read ({size - _LENGTH} of {length} bytes)")
        entries = _entries(stream.read(length), file.name)
    data = size - _LENGTH - length
    return [_tensor(name, entry, data, file.name) for name, entry in entries.items()]


def _entries(text: bytes, file: str) -> dict[str, _Entry]:
    try:
        header: Any = from_json(text)
        if isinstance(header, dict):
            header.pop(_METADATA, None)
        return _HEADER.validate_python(header)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise HeaderError(f"the header of {file} cannot be read: {place[:200]}: {first['msg']}") from error
    except ValueError as error:
        raise HeaderError(f"the header of {file} cannot be read: {error}") from error


def _tensor(name: str, entry: _Entry, data: int, file: str) -> Tensor:
    """Return the tensor that an entry of a header describes, and check its place. `data`: bytes behind the header.
    Raises HeaderError."""
    if entry.dtype not in BITS:
        raise HeaderError(f"the tensor {name} of {file} has the unknown type {entry.dtype[:40]!r}")
    begin, end = entry.data_offsets
    if not begin <= end <= data:
        raise HeaderError(f"the tensor {name} of {file} lies at bytes {begin} to {end} of {data}")
    tensor = Tensor(name, entry.dtype, tuple(entry.shape))
    if tensor.stored_bytes != end - begin:
        raise HeaderError(f"the tensor {name} of {file} has {end - begin} bytes, and its shape {tensor.stored_bytes}")
    return tensor


MAIN = "main"
_LARGEST_CONFIG = 16 << 20
"""Bytes. That of a large model has some ten thousand."""


@dataclass(frozen=True)
class ModelFiles:
    """The model that a folder holds."""

    folder: Path
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...] | None
    """None: no safetensors are here, or not all of them."""
    file_bytes: int
    """The bytes of the files that vLLM would load; 0 where there are none, or not all of them."""
    lacks: str | None = None
    """What is missing of weights of which some are here."""


def hub_cache(environ: Mapping[str, str], download_dir: str | None = None) -> Path:
    """Return the hub's cache folder as huggingface_hub finds it. `download_dir`: vLLM's flag."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    if named := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache).expanduser() / "huggingface" / "hub"


def cached_snapshot(cache: Path, model: str, revision: str | None) -> Path | None:
    """Return the folder of a model of the hub in its cache; None: it is not there."""
    folder = CacheFolder(cache, model)
    commit = folder.commit_of(revision or MAIN)
    return None if commit is None or not folder.snapshot(commit).is_dir() else folder.snapshot(commit)


def config_in(folder: Path) -> dict[str, Any] | None:
    """Return the content of a model's config.json, with that of hf_quant_config.json as vLLM adds it; None: there is
    none that can be read, which preflight refuses on the node.

    Raises PreflightError for one whose keys have types that they have in no model.
    """
    file = folder / "config.json"
    if (text := _small(file)) is None:
        return None
    config = config_json.read_config(text, str(file), f"correct the file, or fetch the model again into {folder}")
    if config is None or (separate := _small(folder / config_json.SEPARATE_QUANTIZATION)) is None:
        return config
    try:
        return config_json.with_separate_quantization(config, from_json(separate))
    except ValueError as error:
        raise PreflightError(
            f"{config_json.SEPARATE_QUANTIZATION} cannot be read: {error}",
            where=str(folder / config_json.SEPARATE_QUANTIZATION),
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


def read_model(folder: Path, *, load_format: str = "auto") -> ModelFiles:
    """Return everything that is known of a model without its weights. Raises PreflightError."""
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


ENDPOINT = "https://huggingface.co"
_HUB_SECONDS = 20
_PROXY = "check HF_ENDPOINT: a proxy may answer in the hub's place"
_OFFLINE = ("1", "true", "yes", "on")


def fetch_config(
    model: str, revision: str | None, environ: Mapping[str, str], transport: httpx.BaseTransport | None = None
) -> dict[str, Any]:
    """Fetch a model's config.json, with hf_quant_config.json as vLLM adds it. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE
    of `environ` count, as for huggingface_hub. Raises PreflightError."""

    def get(file: str, missing_ok: bool = False) -> httpx.Response | None:
        return _get_from_hub(model, revision, file, environ, transport, missing_ok)

    answer = get("config.json")
    assert answer is not None
    config = config_json.read_config(answer.content, "model.id", "correct model.id or model.revision")
    if config is None:
        raise _hub_error(model, f"what {_asked_host(answer)} answers is no JSON object", _PROXY)
    if (
        config.get(config_json.QUANTIZATION_KEY) is None
        and (separate := get(config_json.SEPARATE_QUANTIZATION, missing_ok=True)) is not None
    ):
        try:
            return config_json.with_separate_quantization(config, from_json(separate.content))
        except ValueError as error:
            what = f"the {config_json.SEPARATE_QUANTIZATION} that {_asked_host(separate)} answers is no JSON: {error}"
            raise _hub_error(model, what, _PROXY) from error
    return config


def _get_from_hub(
    model: str,
    revision: str | None,
    file: str,
    environ: Mapping[str, str],
    transport: httpx.BaseTransport | None,
    missing_ok: bool,
) -> httpx.Response | None:
    """Get a file; None: there is no such file, and that is `missing_ok`."""
    import httpx

    if environ.get("HF_HUB_OFFLINE", "").lower() in _OFFLINE:
        raise _hub_error(model, "HF_HUB_OFFLINE forbids to ask the hub", "unset HF_HUB_OFFLINE, or leave out --online")
    endpoint = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    token = environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = httpx.URL(f"{endpoint}/{model}/resolve/{quote(revision or MAIN, safe='')}/{file}")
        with httpx.Client(transport=transport, timeout=_HUB_SECONDS, follow_redirects=True) as client:
            answer = client.get(url, headers=headers)
        if missing_ok and answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise _hub_error(
                model,
                f"{url.host} answers {code}: the model is gated or private, or it does not exist",
                "set HF_TOKEN to a token that may read it, or correct model.id",
            ) from error
        raise _hub_error(
            model, f"{url.host} answers {code} for {url.path}", "correct model.id or model.revision"
        ) from error
    except httpx.InvalidURL as error:
        raise _hub_error(
            model, f"HF_ENDPOINT is no URL: {error}", f"unset HF_ENDPOINT, or set it to {ENDPOINT}"
        ) from error
    except httpx.HTTPError as error:
        raise _hub_error(
            model, f"{url.host} cannot be reached: {error}", "check the network and HF_ENDPOINT, or leave out --online"
        ) from error


def _asked_host(answer: httpx.Response) -> str:
    """Return the host that was asked, before it sent us to another one."""
    return (answer.history or [answer])[0].url.host


def _hub_error(model: str, cause: str, todo: str) -> PreflightError:
    return PreflightError(
        f"the config.json of {model} cannot be had from the hub", where="model.id", cause=cause, todo=todo
    )


_CONFIGS = ("config.json", "params.json")
_INDEX = ".index.json"
_LARGEST_READ = 64 << 20
"""Bytes of a file that is read whole. An index of a large model has some ten million."""
_DIGITS = 12


def model_identity(folder: Path) -> str | None:
    """Return a name of the model for a reader, with a digest of its configuration, the index of its weights, the names
    and sizes of all files of weights and, in the hub's cache, the commit; None: there is none that can be read. Other
    weights in files of the same names and sizes are not seen."""
    digest = hashlib.sha256()
    try:
        files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
        weights = sorted(set(files) - set(configuration_files(files)))
        read = [name for name in files if name in _CONFIGS or name.endswith(_INDEX)]
        if not any(name in _CONFIGS for name in read):
            return None
        for name in read:
            if files[name].stat().st_size <= _LARGEST_READ:
                digest.update(f"{name}\0".encode() + hashlib.sha256(files[name].read_bytes()).digest())
        sizes = {name: files[name].stat().st_size for name in weights}
    except OSError:
        return None
    digest.update("".join(f"{name}\0{size}\0" for name, size in sizes.items()).encode())
    if COMMIT.fullmatch(folder.name):
        digest.update(folder.name.encode())
    return f"{digest.hexdigest()[:_DIGITS]} ({len(sizes)} files of weights, {sum(sizes.values())} bytes)"
