"""Reads a file that some version of pdserve has written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pdserve.errors import StateError

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_model(model: type[ModelT], data: bytes, file: Path, *, todo: str) -> ModelT:
    """`data`: what is in the file. Raises StateError when it is no such model of this version; `todo` is its end."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise StateError(
            f"this is no {file.name} of this version of pdserve",
            where=str(file),
            cause=": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"]))),
            todo=f"use the version that wrote it{todo}",
        ) from None
