"""Whether the devices of the plan are there and may be used."""

from __future__ import annotations

from collections.abc import Collection

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding


def find_devices(plan: Plan, node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """Nothing where no device is needed."""
    needed = {device for process in starting for device in process.devices}
    if not needed:
        return []
    setting = " ".join(f"{name}={value}" for name, value in facts.device_variables.items())
    missing, hidden = needed - set(facts.devices_present), needed - set(facts.devices_visible)
    if not missing and not hidden:
        return [_finding(plan, node, "ok", f"devices {_ids(facts.devices_visible)}", needed)]
    if missing and not facts.devices_present:
        driver = "no device" if plan.platform == "cpu" else f"no {plan.platform} driver that shows devices"
        # The variables were set outside; only the engine can check them.
        status, value = ("failed", driver) if hidden else ("unknown", f"{driver}, but {setting}")
    elif missing:
        status, value = "failed", f"the driver shows {_ids(facts.devices_present)}"
    else:
        status, value = "failed", f"the job may use {_ids(facts.devices_visible)} ({setting})"
    fix = (
        "ask for these devices in the allocation (--gpus-per-node), or name others (<role>.devices)"
        if hidden and not missing
        else "run it where they are (exclude_nodes), load the driver, or name others (<role>.devices)"
    )
    return [_finding(plan, node, status, value, needed, fix)]


def _finding(
    plan: Plan, node: str, status: str, value: str, needed: Collection[int], fix: str | None = None
) -> Finding:
    return Finding.model_validate(
        {
            "node": node,
            "check": "devices",
            "status": status,
            "value": value,
            "need": f"devices {_ids(needed)}",
            "fix": fix,
            "unverified_on_hardware": plan.platform == "rocm",
        }
    )


def _ids(devices: Collection[int]) -> str:
    return ",".join(str(device) for device in sorted(devices)) or "none"
