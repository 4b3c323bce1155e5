"""One wrong input of each kind with its message, as one text: what the golden file has."""

from __future__ import annotations

import shlex
import tempfile
from functools import cache
from pathlib import Path

from pdserve.recipe.load import invisible
from tests.messages import wrong_keys, wrong_together, wrong_values, wrong_yaml
from tests.messages.kit import CPU, GOOD, HOSTS, Case, run, write

GOLDEN = Path(__file__).parent / "golden" / "wrong_inputs.txt"
KINDS: tuple[tuple[Case, ...], ...] = (*wrong_values.KINDS, *wrong_keys.KINDS, *wrong_yaml.KINDS, *wrong_together.KINDS)
CASES = tuple(case for kind in KINDS for case in kind)
_HEAD = """\
A wrong input of each kind and what pdserve says about it, whole. Written by `python -m tests.regenerate`: the diff is
for you to read, as someone who meets the message for the first time. Invisible characters are shown by their codes.

Beside each input there are good files: good.yaml, cpu.yaml, hosts.yaml.

"""


def message(case: Case) -> str:
    """What the command of the case writes to stderr, with paths as they are typed."""
    return _message_of(case.title)


@cache
def _message_of(title: str) -> str:
    """By title: a case cannot be hashed, and no two have one title."""
    [case] = (case for case in CASES if case.title == title)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write(case, folder)
        return run(case.argv, folder, case.environ).err.replace(f"{folder}/", "")


def entry(number: int, case: Case) -> str:
    """One wrong input: its files, its command, its message."""
    files = "".join(_file(name, text) for name, text in case.shown.items())
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in case.environ.items())
    command = invisible.escaped(shlex.join(case.argv))
    return f"=== {number}. {case.title}\n{files}$ {variables}pdserve {command}\n{message(case).rstrip()}\n"


def text() -> str:
    """The golden file."""
    good = "".join(_file(name, body) for name, body in (("good.yaml", GOOD), ("cpu.yaml", CPU), ("hosts.yaml", HOSTS)))
    entries = (entry(number, kind[0]) for number, kind in enumerate(KINDS, start=1))
    return _HEAD + good + "\n" + "\n".join(entries)


def main() -> None:
    """Writes the golden file anew."""
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(text())


def _file(name: str, body: str | bytes) -> str:
    if isinstance(body, bytes):
        return f"--- {name}\n  {body[:60]!r}{'...' if len(body) > 60 else ''}\n"
    lines = (f"  {invisible.escaped(line).replace(chr(9), chr(92) + 't')}" for line in body.split("\n")[:-1])
    return f"--- {name}\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
