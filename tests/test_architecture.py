"""The order of the rooms, one place that starts processes, no circle, nothing swallowed: what a reader relies on.

The order is the table of docs/architecture.md, from the top: a room imports from itself and from the rows below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.docs.markdown import REPOSITORY, Page

PACKAGE = REPOSITORY / "pdserve"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
ROWS = [
    [name.strip("` ").removesuffix(".py").replace("/", ".") for name in row[0].split(",")]
    for row in Page(REPOSITORY / "docs" / "architecture.md").table("room")
]
FLOOR = {f"pdserve.{name}": index for index, names in enumerate(ROWS) for name in names}


def room(module: str) -> str:
    """The row's name that a module belongs to: pdserve.pd.http.front is in pdserve.pd.http. The roots, which hold a
    docstring and a version, are in none."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in FLOOR:
            return name
    return ""


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(MODULES[module].read_text())))


@cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """Every module that is imported, in functions too and by `import_module("name")`, with its line."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, int]]:
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module), node.lineno
        elif isinstance(node, ast.Call) and called(node).split(".")[-1] == "import_module" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


def called(node: ast.Call) -> str:
    """`name` or `name.name`; of a longer one the end."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return f"{function.value.id}.{function.attr}" if isinstance(function.value, ast.Name) else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of a graph, empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_imports_go_down() -> None:
    upward = [
        f"{module}:{line} imports {imported} from a row above or beside it"
        for module in MODULES
        for imported, line in imports(module)
        if imported in MODULES and room(module) and room(imported) not in ("", room(module))
        if FLOOR[room(module)] >= FLOOR[room(imported)]
    ]
    rootless = [
        f"{module}:{line} is in no room and imports {imported}"
        for module in MODULES
        if not room(module)
        for imported, line in imports(module)
        if imported.startswith("pdserve.")
    ]
    assert not upward + rootless


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: {name for name, _ in imports(module) if name in MODULES} - {module} for module in MODULES}
    assert not circle(graph)


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_every_room_of_the_table_is_there_and_every_module_is_in_one() -> None:
    assert not [name for name in FLOOR if name not in MODULES]
    assert [module for module in MODULES if not room(module)] == ["pdserve", "pdserve.pd"]


def test_engines_are_imported_nowhere_but_in_the_patches_that_wrap_them() -> None:
    engines = {"vllm", "lmcache", "mooncake", "torch", "transformers"}
    # The client of a benchmark, the look at Mooncake's wheel and an end of a transfer are programs of their own, run by
    # the engines' interpreter.
    programs = (
        "pdserve.bench.vllm_program",
        "pdserve.installed.distributions",
        "pdserve.preflight.transfer_program",
    )
    others = [m for m in MODULES if room(m) not in ("pdserve.patches", "pdserve.connectors") and m not in programs]
    assert not {module: used for module in others if (used := packages(module) & engines)}


def test_limits_of_time_hold_in_a_cancelled_task() -> None:
    asyncios = {
        f"{module}:{node.lineno}"
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.Attribute) and node.attr in ("timeout", "timeout_at", "wait_for")
        if isinstance(node.value, ast.Name) and node.value.id == "asyncio"
    }
    assert not asyncios, "pdserve.time_limit is what does, from Python 3.11.0 on"


def test_one_module_starts_processes() -> None:
    starters = {"subprocess", "multiprocessing", "pty"}
    # A channel holds the pipes of a process that pdserve.system.process has started; patches ask who they are.
    allowed = {
        "pdserve.system.process": starters,
        "pdserve.reach.link": {"subprocess"},
        "pdserve.patches.record": {"multiprocessing"},
    }
    assert not {m: used for m in MODULES if (used := (packages(m) & starters) - allowed.get(m, set()))}


def packages(module: str) -> set[str]:
    """The top of every name that it imports."""
    return {name.split(".")[0] for name, _ in imports(module)}


def test_nothing_is_swallowed_or_shelled() -> None:
    assert not [line for module in MODULES for line in swallowed_or_shelled(module)]


def swallowed_or_shelled(module: str) -> Iterator[str]:
    """Each place of a module that catches everything, or starts a shell or an interpreter of its own."""
    for node in nodes(module):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{module}:{node.lineno}: bare except"
                continue
            names = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            if names & {"Exception", "BaseException"}:
                yield f"{module}:{node.lineno}: catches everything"
        if isinstance(node, ast.Call):
            if (name := called(node)) in {"eval", "exec", "os.system", "yaml.load"}:
                yield f"{module}:{node.lineno}: {name}"
            if any(keyword.arg == "shell" for keyword in node.keywords):
                yield f"{module}:{node.lineno}: shell"


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        whole = nodes(module)[0]
        assert isinstance(whole, ast.Module)
        for node in whole.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}
