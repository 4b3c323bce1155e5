"""A plan as bash: what `pdserve up` runs, for people to read, copy from and run by hand.

The script starts one process, or all of one node in order. It supervises nothing, proves nothing and restarts
nothing: that is what `pdserve up` is for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import assert_never

from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan, cpu_share
from pdserve.plan.node import Node
from pdserve.plan.process import ExitProbe, HttpProbe, LmcacheProbe, Probe, Process

_POLL_SECONDS = 0.5

_PRELUDE = """\
set -euo pipefail

# Unsets every exported variable that none of its arguments names; PREFIX_* names all that begin with PREFIX_.
keep_only() {
  local name rule
  for name in $(compgen -e); do
    for rule; do
      case $name in $rule) continue 2 ;; esac
    done
    unset "$name"
  done
}
"""

_MAIN = """\
# launch NAME LOG URL: starts a process in the background, into its log; URL is where it will say that it is ready.
launch() {
  "run_${1//-/_}" >>"$RUN_DIR/$2" 2>&1 &
  started+=("$!")
  if [ -n "$3" ]; then waiting+=("$1 $3"); fi
  echo "$1: PID $!, log $RUN_DIR/$2"
}

# finish NAME LOG: runs a process to its end; the next ones need what it leaves.
finish() {
  echo "$1: runs, log $RUN_DIR/$2"
  ("run_${1//-/_}") >>"$RUN_DIR/$2" 2>&1 || { echo "$1 failed; its log says why" >&2; exit 4; }
}

await_all() {
  local entry name url pid
  for entry in ${waiting[@]+"${waiting[@]}"}; do
    read -r name url <<<"$entry"
    until curl --silent --fail --output /dev/null --max-time 3 "$url"; do
      for pid in "${started[@]}"; do
        kill -0 "$pid" 2>/dev/null || { echo "PID $pid died; its log says why" >&2; exit 4; }
      done
      sleep @POLL@
    done
    echo "$name: ready"
  done
  waiting=()
}

stop_all() {
  kill ${started[@]+"${started[@]}"} 2>/dev/null || true
  wait
}

started=()
waiting=()
case "${1:-}" in
@CASES@
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: @NAMES@" >&2
    echo "nodes: @NODES@" >&2
    exit 2
    ;;
esac
"""


def render_shell(plan: Plan) -> str:
    """Render the script. Secrets are read from the environment of whoever runs it; the engine key is made up if
    unset."""
    parts = [
        "#!/usr/bin/env bash",
        f"# {plan.name}: {plan.mode}, {plan.platform}, {len(plan.processes)} processes on {len(plan.nodes)} node(s).",
        "# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.",
        *(line for warning in plan.warnings for line in _comment_lines(f"# warning: {warning}")),
        *(line for node in plan.nodes if node.agent for line in _agent(node)),
        _PRELUDE,
        f"RUN_DIR={shlex.quote(plan.run_dir)}",
        *_engine_key(plan),
        'mkdir -p "$RUN_DIR/logs"',
        "",
        *(line for process in plan.processes for line in _function(process, cpu_share(plan, process.name))),
        _main(plan),
    ]
    return "\n".join(parts)


def _agent(node: Node) -> Iterator[str]:
    """Yield the agent's command as comments, because a script starts processes without an agent. The options of the
    program stay beside it."""
    yield "#"
    yield f"# {node.name}: `pdserve up` starts its agent, and the agent all processes of the node, with"
    lines = [node.agent[0]]
    for argument in node.agent[1:]:
        quoted = shlex.quote(argument)
        if argument.startswith("-"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    yield from _comment_lines("#   " + " \\\n".join(lines))


def _comment_lines(text: str) -> Iterator[str]:
    """Yield a comment of several lines: bash runs what stands behind a line break of a value, quoted or not."""
    first, *others = text.split("\n")
    yield first
    yield from (f"#   {line}" for line in others)


def _engine_key(plan: Plan) -> Iterator[str]:
    if any(ENGINE_KEY in process.env.secrets.values() for process in plan.processes):
        yield "# All processes of a deployment share it: on several nodes export the same one everywhere."
        yield f"export {ENGINE_KEY}=\"${{{ENGINE_KEY}:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \\n')}}\""


def _function(process: Process, cpus: tuple[int, int] | None) -> Iterator[str]:
    for text in _comment(process):
        yield from _comment_lines(text)
    if cpus is not None:
        yield f"#   CPUs: part {cpus[0] + 1} of {cpus[1]} of the node's (by hand: taskset --cpu-list)"
    yield f"{_function_name(process.name)}() {{"
    for path, content in process.files.items():
        end = _heredoc_end(content)
        yield f"  cat >\"$RUN_DIR/{path}\" <<'{end}'"
        yield content.removesuffix("\n")
        yield end
    for variable, secret in sorted(process.env.secrets.items()):
        yield f'  {variable}="${{{secret}:?}}"'
    if process.env.base == "allow":
        kept = (*process.env.allow, *sorted(process.env.secrets))
        yield _wrap_words("  keep_only", [shlex.quote(name) for name in kept])
    elif process.env.unset:
        yield _wrap_words("  unset", process.env.unset)
    if ENGINE_KEY not in process.env.secrets:
        yield f"  unset {ENGINE_KEY}"
    for variable, value in sorted(process.env.set.items()):
        yield f"  export {variable}={shlex.quote(value)}"
    if process.env.secrets:
        yield f"  export {' '.join(sorted(process.env.secrets))}"
    yield f"  exec {_command(process)}"
    yield "}"
    yield ""


def _comment(process: Process) -> Iterator[str]:
    devices = f"devices {','.join(str(device) for device in process.devices)}" if process.devices else "no devices"
    ports = ", ".join(f"{purpose} {port}" for purpose, port in process.ports.items()) or "none"
    yield f"# {process.name} ({process.role}) on {process.node}: start stage {process.start_stage}, {devices}"
    yield f"#   ports: {ports}; log: {process.log}"
    yield f"#   ready: {_ready(process.probe)}"
    if process.patches:
        yield f"#   patches: {', '.join(process.patches)}"
    if process.control == "stdin":
        yield "#   by hand there is no launcher that reports ready workers, hence --no-control"


def _ready(probe: Probe | None) -> str:
    match probe:
        case None:
            return "never probed (it has no API server)"
        case ExitProbe():
            return "it has ended with code 0"
        case LmcacheProbe():
            return f"{_url(probe)} answers 200, and /config names {probe.instance_id}"
        case HttpProbe():
            return f"{_url(probe)} answers 200"
        case _:
            assert_never(probe)


def _url(probe: HttpProbe | LmcacheProbe) -> str:
    host = f"[{probe.host}]" if ":" in probe.host else probe.host
    if isinstance(probe, LmcacheProbe):
        return f"http://{host}:{probe.port}/healthcheck"
    return f"{probe.scheme}://{host}:{probe.port}{probe.path}"


def _command(process: Process) -> str:
    """Write a command with one argument a line, except that a flag keeps its value beside it."""
    argv = [*process.argv, *(["--no-control"] if process.control == "stdin" else [])]
    lines: list[str] = []
    for argument in argv:
        quoted = shlex.quote(argument)
        if lines and not argument.startswith("--"):
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n    ".join(lines)


def _wrap_words(head: str, words: Sequence[str], width: int = 110) -> str:
    lines = [head]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _main(plan: Plan) -> str:
    cases = [f"  {name}) {_function_name(name)} ;;" for name in plan.names()]
    for node in plan.nodes:
        cases.append(f"  @{shlex.quote(node.name)})")
        cases.append("    trap stop_all EXIT")
        here = sorted((p for p in plan.processes if p.node == node.name), key=lambda process: process.start_stage)
        for index, process in enumerate(here):
            if index and process.start_stage != here[index - 1].start_stage:
                cases.append("    await_all")
            if isinstance(process.probe, ExitProbe):
                cases.append(f"    finish {process.name} {shlex.quote(process.log)}")
                continue
            url = _url(process.probe) if process.probe is not None else ""
            cases.append(f"    launch {process.name} {shlex.quote(process.log)} {shlex.quote(url)}")
        cases += ["    await_all", '    echo "all processes of this node are up"', "    wait -n", "    ;;"]
    main = _MAIN.replace("@POLL@", str(_POLL_SECONDS)).replace("@CASES@", "\n".join(cases))
    main = main.replace("@NAMES@", " ".join(plan.names()))
    return main.replace("@NODES@", " ".join(f"@{node.name}" for node in plan.nodes))


def _heredoc_end(content: str) -> str:
    end = "END_OF_FILE"
    while end in content:
        end += "_"
    return end


def _function_name(process: str) -> str:
    return "run_" + re.sub(r"[^A-Za-z0-9]", "_", process)
