"""The house's rules that a reader relies on: arrows run down only, one place starts processes, nothing is swallowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pdserve"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

FLOORS = [
    # From the top. A module may import from its own room and from floors below it.
    {"pdserve.cli"},
    {"pdserve.running", "pdserve.survey"},
    {"pdserve.candidates", "pdserve.change", "pdserve.scout"},
    {"pdserve.launcher"},
    {"pdserve.recovery", "pdserve.rolling", "pdserve.start_proofs"},
    {
        "pdserve.verify",
        "pdserve.status_view",
        "pdserve.failure",
        "pdserve.failure_report",
        "pdserve.record",
        "pdserve.retention",
        "pdserve.preflight",
    },
    {"pdserve.elsewhere"},
    {"pdserve.fleet", "pdserve.leftovers", "pdserve.control", "pdserve.engine_env", "pdserve.slurm_job"},
    {"pdserve.transport", "pdserve.agent", "pdserve.engine_view"},
    {"pdserve.patched", "pdserve.torch_fallback", "pdserve.fetched"},
    {"pdserve.supervised", "pdserve.lmcache_server", "pdserve.canary", "pdserve.rundir", "pdserve.node_http"},
    {
        "pdserve.engine_key",
        "pdserve.launcher_lock",
        "pdserve.own_logs",
        "pdserve.history",
        "pdserve.unending",
        "pdserve.agent_record",
    },
    {
        "pdserve.protocol",
        "pdserve.state",
        "pdserve.host",
        "pdserve.health",
        "pdserve.shm",
        "pdserve.diagnostics",
        "pdserve.socket_shortage",
    },
    {"pdserve.process", "pdserve.cpu_parts", "pdserve.lives", "pdserve.new_names", "pdserve.cgroup_memory"},
    {"pdserve.sysv_memory", "pdserve.cgroup", "pdserve.markers"},
    {"pdserve.procfs"},
    {"pdserve.plan"},
    {"pdserve.connectors", "pdserve.cluster_file"},
    {"pdserve.patches"},
    {"pdserve.recipe"},
    {"pdserve.proxy"},
    {"pdserve.pd"},
    {"pdserve.hints", "pdserve.log_progress", "pdserve.hostlist", "pdserve.ssh_destination"},
    {"pdserve.hint_table"},
    {"pdserve.errors", "pdserve.log_lines", "pdserve.distributions", "pdserve.lmcache_kernels", "pdserve.versions"},
    {"pdserve.outlet", "pdserve.slurm_variables", "pdserve.weights", "pdserve.own_tls"},
    {"pdserve.weight_files", "pdserve.log_rotation", "pdserve.compiled", "pdserve.printable", "pdserve.utf8"},
    {"pdserve"},
]


def room(module: str) -> str:
    """The first two parts of a dotted name: pdserve.plan.build is in pdserve.plan."""
    return ".".join(module.split(".")[:2])


def floor(module: str) -> int:
    for index, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return index
    raise AssertionError(f"{module} is on no floor: add its room to FLOORS, where its imports allow")


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every module that is imported, in functions too, with its line."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_arrows_run_down(module: str) -> None:
    for imported, line in imports(module):
        if imported.split(".")[0] != "pdserve" or room(imported) == room(module):
            continue
        assert floor(module) < floor(imported), f"{module}:{line} imports {imported} from a floor above or beside it"


@pytest.mark.parametrize("module", MODULES)
def test_engines_are_imported_nowhere_but_in_the_patches_that_wrap_them(module: str) -> None:
    engines = {"vllm", "lmcache", "mooncake", "torch", "transformers"}
    used = {name.split(".")[0] for name, _ in imports(module)} & engines
    assert not used or room(module) in ("pdserve.patches", "pdserve.connectors"), f"{module} imports {used}"


@pytest.mark.parametrize("module", MODULES)
def test_one_module_starts_processes(module: str) -> None:
    starters = {"subprocess", "multiprocessing", "pty"}
    used = {name.split(".")[0] for name, _ in imports(module)} & starters
    # The link holds the pipe of a process that pdserve.process has started; patches ask who they are.
    allowed = {
        "pdserve.process": starters,
        "pdserve.transport.link": {"subprocess"},
        "pdserve.patches.record": {"multiprocessing"},
    }
    assert used <= allowed.get(module, set()), f"{module} imports {used}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_swallowed_or_shelled(module: str) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}:{node.lineno}: bare except"
            names = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
            assert not names & {"Exception", "BaseException"}, f"{module}:{node.lineno}: catches everything"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "os.system", "yaml.load"}, f"{module}:{node.lineno}: {called}"
            assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{module}:{node.lineno}: shell"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_small(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= 450, f"{module} has {lines} lines: is it one concept?"
