"""Reads the records that pdserve leaves, and refuses those of another version."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from pdserve.errors import StateError
from pdserve.plan.frozen import SCHEMA

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_model(model: type[ModelT], data: bytes, file: Path, *, other_version: str, damaged: str) -> ModelT:
    """Return the record that is in `data`, the contents of `file`.

    Args:
        model: The record's type, which has a `schema_version`.
        other_version: What to do where the record has another number than SCHEMA.
        damaged: What to do where it has this number and is no such record: it was cut off, or edited by hand.

    Raises:
        StateError: The record cannot be used.
    """
    try:
        record = model.model_validate_json(data)
        problem = ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    else:
        if "schema_version" in record.model_fields_set:
            return record
    if (number := _number(data)) != SCHEMA:
        raise StateError(
            f"this {file.name} was written by another version of pdserve",
            where=str(file),
            cause=f"its schema_version is {number}, and this version reads {SCHEMA}",
            todo=other_version,
        )
    raise StateError(f"this {file.name} is damaged", where=str(file), cause=problem, todo=damaged)


def _number(data: bytes) -> object:
    """Return the record's schema number; SCHEMA for what is no JSON object, which no version has written."""
    try:
        record = from_json(data)
    except ValueError:
        return SCHEMA
    return record.get("schema_version", "not there") if isinstance(record, dict) else SCHEMA
