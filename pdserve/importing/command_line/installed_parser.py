"""What the parser of an installed vLLM makes of command lines of engines.

It knows the names, short names and switches of its own version, and it refuses what that version does not take. The
engine is asked by operations/vllm_parser_program.py; what is here is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from pdserve.importing.command_line.flag_names import LISTED, FlagNames
from pdserve.importing.launch import CommandLine


class ParsedLine(BaseModel):
    """One command line as the parser read it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: Mapping[str, bool | Sequence[str]]
    """Whole names without dashes -> their words, or whether a switch is on."""
    refused: Mapping[str, str]
    """Flags -> why this version does not take them. No value is repeated: it may be a secret."""
    repeated: frozenset[str]
    """Flags that take a word each time that they are given, and are given several times."""
    variables: Mapping[str, str]
    """Variables of vLLM -> why this version does not take them."""


class InstalledParser(BaseModel):
    """What a vLLM answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    names: frozenset[str]
    short: Mapping[str, str]
    switches: frozenset[str]
    lists: frozenset[str]
    lines: Sequence[ParsedLine]
    """In the order of the command lines that were asked about."""

    def flag_names(self) -> FlagNames:
        """Its names, to read other lines by."""
        return FlagNames(self.names, self.short, self.switches, self.lists)


@dataclass(frozen=True)
class LineReader:
    """How command lines are read: by the names of pdserve's list, or as an installed vLLM reads them."""

    names: FlagNames = LISTED
    version: str | None = None
    """Of the vLLM whose parser was asked; None: the list."""
    lines: Mapping[CommandLine, ParsedLine] = field(default_factory=dict)

    @classmethod
    def of(cls, parser: InstalledParser, asked: Sequence[CommandLine]) -> LineReader:
        """`asked`: the lines to which `parser` has the answers."""
        return cls(parser.flag_names(), parser.version, dict(zip(asked, parser.lines, strict=True)))


BY_LIST = LineReader()
"""Where no vLLM was asked."""
