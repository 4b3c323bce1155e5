"""Prints the test modules that `scripts/test --quick` runs: all that can tell the difference from main.

    python -m tests.affected          # of what differs from main: committed, not committed, new
    python -m tests.affected --all    # all of them

A module can tell a difference in what it imports, at its top or in a function, directly or not. Imports have no cycles
(tests/test_architecture.py), so nothing is missed but programs that a test starts, and `--quick` runs no such tests. A
file that is no module counts as imported by those that have its name, or one of its folders', in quotes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERYWHERE = ROOT / "tests" / "conftest.py"
"""Each test would depend on what its fixtures need: only a change of itself counts."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w.]+))", re.MULTILINE
)
_PROCESSES_ONLY = ("cluster", "containers", "launch", "real", "upstream")


def main() -> int:
    """Entry. Exit code 0, also where nothing differs."""
    modules = {path: path.read_text(encoding="utf-8") for path in _modules()}
    tests = [path for path in modules if _is_quick_test(path)]
    if sys.argv[1:] != ["--all"]:
        changed = _changed()
        seen = affected(modules, changed)
        tests = [path for path in tests if path in seen]
        print(f"{len(changed)} files differ from main: {len(tests)} test modules (--all: all)", file=sys.stderr)
    print(*(path.relative_to(ROOT) for path in tests), sep="\n", end="\n" if tests else "")
    return 0


def affected(modules: Mapping[Path, str], changed: Iterable[Path]) -> set[Path]:
    """Return the modules (path -> source) that are among the changed files, or import one of them, directly or not."""
    importers: dict[Path, set[Path]] = {}
    for path, source in modules.items():
        for imported in _imported(path, source):
            importers.setdefault(imported, set()).add(path)
    found: set[Path] = set()
    left = [module for path in changed for module in (_users(path, modules) if path not in modules else [path])]
    if EVERYWHERE in left:
        return set(modules)
    while left:
        path = left.pop()
        if path not in found and path != EVERYWHERE:
            found.add(path)
            left += importers.get(path, ())
    return found


def _modules() -> Iterator[Path]:
    for folder in ("pdserve", "tests", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def _is_quick_test(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] == "tests" and path.name.startswith("test_") and parts[1] not in _PROCESSES_ONLY


def _changed() -> list[Path]:
    known = _git("for-each-ref", "--format=%(refname:short)")
    main = next((name for name in ("origin/main", "main") if name in known), "HEAD")
    [base] = _git("merge-base", "HEAD", main)
    names = [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]
    return [ROOT / name for name in dict.fromkeys(names)]


def _git(*words: str) -> list[str]:
    """Return the lines that git prints. Raises CalledProcessError: what has changed is not known then."""
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def _users(path: Path, modules: Mapping[Path, str]) -> list[Path]:
    """The modules that read a file which is no module, or which was removed."""
    parts = path.relative_to(ROOT).parts
    names = "|".join(map(re.escape, {*parts} - {"pdserve", "tests"}))
    removed = re.escape(".".join(parts).removesuffix(".py"))
    quoted = re.compile(rf"""["'/](?:{names})["'/]|\b{removed}\b""")
    return [module for module, source in modules.items() if quoted.search(source)]


def _imported(path: Path, source: str) -> Iterator[Path]:
    """Yield the files of this project that a module imports, and what pytest imports for it."""
    for match in _IMPORT.finditer(source):
        package, names, module = match.groups()
        yield from _files(module or package)
        for name in re.findall(r"\w+", names or ""):
            yield from _files(f"{package}.{name}")
    if path.name.startswith("test_"):
        yield from (folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").exists())


def _files(module: str) -> Iterator[Path]:
    parts = module.split(".")
    if parts[0] not in ("pdserve", "tests", "benchmarks"):
        return
    for count in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:count])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists())


if __name__ == "__main__":
    sys.exit(main())
