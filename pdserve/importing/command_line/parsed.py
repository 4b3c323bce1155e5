"""The flags of a role, corrected by what the parser of an installed vLLM made of its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.importing.command_line.flags import flag, typed
from pdserve.importing.command_line.installed_parser import LineReader, ParsedLine
from pdserve.importing.launch import CommandLine, Launch, Sourced
from pdserve.recipe.flags import flag_words
from pdserve.recipe.load import show


def line_of(args: Mapping[str, Sourced], env: Mapping[str, Sourced]) -> CommandLine:
    """The command line of flags that are data. A model stands first: it would take the next free word otherwise."""
    return CommandLine(("MODEL", *flag_words({name: at.value for name, at in args.items()})), variables_of(env))


def variables_of(env: Mapping[str, Sourced]) -> tuple[tuple[str, str], ...]:
    """Those of vLLM, without its key."""
    return tuple(
        (name, str(at.value))
        for name, at in env.items()
        if name.startswith("VLLM_") and isinstance(at.value, str | int | float) and not show.secret_name(name)
    )


def as_parsed(
    args: dict[str, Sourced], line: CommandLine, reader: LineReader, launch: Launch, at: Sourced
) -> dict[str, Sourced]:
    """`args` as the names give them, in their order; `at`: where the role is described. The parser's values hold. What
    its version does not take stays in the recipe, and is a note."""
    parsed = reader.lines.get(line)
    if parsed is None:
        return args
    for name, why in (*parsed.refused.items(), *parsed.variables.items()):
        shown = name if name in parsed.variables else f"--{name}" if name else "vllm serve"
        place = args.get(name, at)
        launch.note(
            Sourced(None, shown, place.line), f"vLLM {reader.version}, which is installed here: {why}", "confirm"
        )
    return _corrected(args, parsed, launch, at) if parsed.flags else args


def _corrected(args: dict[str, Sourced], parsed: ParsedLine, launch: Launch, at: Sourced) -> dict[str, Sourced]:
    corrected: dict[str, Sourced] = {}
    for name in (*args, *(name for name in parsed.flags if name not in args)):
        ours = args.get(name)
        if name not in parsed.flags:
            # A word that the parser reads as a part of another flag is no flag; one that it refuses is.
            if ours is not None and name in parsed.refused:
                corrected[name] = ours
            continue
        words = parsed.flags[name]
        if ours is None:
            ours = Sourced(None, f"--{name}", at.line)
        if name in parsed.repeated:
            launch.note(ours, "given several times, which args of a recipe cannot: it has the last one", "served")
            words = words if isinstance(words, bool) else words[-1:]
        corrected[name] = ours.of(_value(name, words))
    return corrected


def _value(name: str, words: bool | Sequence[str]) -> object:
    if isinstance(words, bool):
        return words
    return flag(f"--{name}", words[0]).value if len(words) == 1 else [typed(word) for word in words]
