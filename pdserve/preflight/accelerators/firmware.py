"""The firmware of AMD's compute engines (MEC), and the variable that old ones need."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.system.process import Output, output_of

SWITCH = "HSA_NO_SCRATCH_RECLAIM"
FIRST_GOOD = 177
"""With older firmware the scratch memory of RCCL cannot be reclaimed, and vLLM crashes unless the switch is 1: vLLM's
recipe for Kimi-K2.5 on MI355X, and the published launches, which also set it where the version cannot be read."""

_SHOW = ("rocm-smi", "--showfw")
_TOOL_SECONDS = 20.0
_MEC = re.compile(r"\bMEC\b.*?(\S+)\s*$", re.MULTILINE)
Run = Callable[[tuple[str, ...]], Output]


def _run(argv: tuple[str, ...]) -> Output:
    return output_of(argv, timeout=_TOOL_SECONDS)


def find_firmware(
    plan: Plan, node: str, starting: Collection[Process], environ: Mapping[str, str], run: Run = _run
) -> list[Finding]:
    """Nothing where no engine uses AMD's devices. `environ`: what the node's agent passes on to engines."""
    engines = [process for process in starting if process.is_engine and process.devices]
    if plan.platform != "rocm" or not engines:
        return []
    lacking = [engine.name for engine in engines if _switch(engine, environ) != "1"]
    asked = run(_SHOW)
    version = mec_version(asked.out) if asked.code == 0 else None
    value = f"MEC firmware {version}" if version is not None else f"MEC firmware unknown: {_why(asked)}"
    if version is not None and version >= FIRST_GOOD:
        return [_finding(node, "ok", value)]
    if not lacking:
        return [_finding(node, "ok", f"{value}, and {SWITCH}=1")]
    value += f", and {SWITCH} is not 1 for {', '.join(lacking)}"
    return [_finding(node, "warning", value, f"set engine.env.{SWITCH}: 1, or update the firmware")]


def mec_version(text: str) -> int | None:
    """The last word of the first MEC line of `rocm-smi --showfw`; None: there is none, or it is no number."""
    match = _MEC.search(text)
    return int(match[1]) if match is not None and match[1].isdecimal() else None


def _switch(engine: Process, environ: Mapping[str, str]) -> str | None:
    inherited = environ.get(SWITCH) if engine.env.inherits(SWITCH) else None
    return engine.env.set.get(SWITCH, inherited)


def _why(asked: Output) -> str:
    if asked.code is None:
        return f"rocm-smi cannot be run ({asked.err})"
    if asked.code != 0:
        return f"rocm-smi ended with {asked.code}"
    return "rocm-smi shows no MEC line with a number"


def _finding(node: str, status: str, value: str, fix: str | None = None) -> Finding:
    return Finding.model_validate(
        {
            "node": node,
            "check": "firmware",
            "status": status,
            "value": value,
            "need": f"MEC firmware {FIRST_GOOD} or newer, or {SWITCH}=1: older ones cannot reclaim RCCL's scratch "
            "memory, and vLLM crashes",
            "fix": fix,
            "unverified_on_hardware": True,
        }
    )
