"""Variables that must be the same for an engine and for the LMCache server that opens its device memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.preflight.of_plan import on_node

MUST_AGREE = {
    "HSA_ENABLE_IPC_MODE_LEGACY": "ROCm's runtime makes one kind of handle to device memory with 1 and another with 0, "
    "and neither can be opened as the other",
}
"""Variable -> why (ROCR: flag.h; IPCCreate and IPCAttach in runtime.cpp). Where it is not set the runtime's own default
holds, which is not the same in every release. Others may differ: scratch memory, for example, is a matter of each
process."""


def find_shared_environment(
    plan: Plan, node: str, starting: Collection[Process], environ: Mapping[str, str]
) -> list[Finding]:
    """One finding for each variable that differs, and one where all agree; nothing where no engine of the node
    attaches. `environ`: what the node's agent passes on."""
    if plan.platform != "rocm":
        return []
    there = {process.name: process for process in on_node(plan, node)}
    names = {process.name for process in starting}
    pairs = [
        (engine, there[engine.lmcache])
        for engine in there.values()
        if engine.lmcache is not None and {engine.name, engine.lmcache} & names
    ]
    differences = [
        finding
        for engine, server in pairs
        for variable in MUST_AGREE
        if (finding := _difference(node, variable, engine, server, environ)) is not None
    ]
    if pairs and not differences:
        value = f"{', '.join(MUST_AGREE)} the same for engines and LMCache"
        return [Finding(node=node, check="environment", status="ok", value=value, need="the same on both sides")]
    return differences


def _difference(
    node: str, variable: str, engine: Process, server: Process, environ: Mapping[str, str]
) -> Finding | None:
    ours, theirs = (_value(process, variable, environ) for process in (engine, server))
    if ours == theirs:
        return None
    if ours is None:
        fix = f"remove lmcache.env.{variable}, or set engine.env.{variable} to the same"
    else:
        fix = f"set lmcache.env.{variable}: {ours}, as the engines have it"
    return Finding(
        node=node,
        check="environment",
        # What is not set on one side may have the same value there by the runtime's default.
        status="warning" if None in (ours, theirs) else "failed",
        value=f"{variable} is {_shown(ours)} for {engine.name} and {_shown(theirs)} for {server.name}",
        need=f"the same on both sides: {MUST_AGREE[variable]}",
        fix=fix,
        where=f"lmcache.env.{variable}" if variable in server.env.set else f"engine.env.{variable}",
        unverified_on_hardware=True,
    )


def _value(process: Process, variable: str, environ: Mapping[str, str]) -> str | None:
    """What the process will have; None: not set."""
    if variable in process.env.set:
        return process.env.set[variable]
    return environ.get(variable) if process.env.inherits(variable) else None


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
