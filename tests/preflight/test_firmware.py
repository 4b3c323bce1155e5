"""The MEC firmware of AMD's devices, by recorded output of rocm-smi."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.devices import SWITCH, find_firmware, mec_version
from pdserve.preflight.finding import Finding
from pdserve.system.process import Output
from tests.plan.kit import hosts, on_gpus, plan, recipe

SHOWN = """\

============================ ROCm System Management Interface ============================
=================================== Firmware Information ===================================
GPU[0]\t\t: ASD firmware version: \t553648226
GPU[0]\t\t: MC firmware version: \t\t0
GPU[0]\t\t: ME firmware version: \t\t0
GPU[0]\t\t: MEC firmware version: \t{mec}
GPU[0]\t\t: MEC2 firmware version: \t999
GPU[1]\t\t: MEC firmware version: \t999
============================================================================================
"""


def planned(env: dict[str, Any] | None = None, *, platform: str = "rocm") -> Plan:
    return plan(recipe(on_gpus(platform=platform), {"engine": {"env": env or {}}}), *hosts(2))


def look(wanted: Plan, output: Output, **environ: str) -> list[Finding]:
    return find_firmware(wanted, "host0", wanted.processes, environ, lambda _: output)


def shown(mec: object) -> Output:
    return Output(0, SHOWN.format(mec=mec), "")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (SHOWN.format(mec=181), 181),
        (SHOWN.format(mec="unreadable"), None),
        ("GPU[0]\t\t: MEC2 firmware version: \t181\n", None),
        ("", None),
    ],
)
def test_it_is_the_last_word_of_the_first_line_about_mec(text: str, version: int | None) -> None:
    assert mec_version(text) == version


@pytest.mark.parametrize("mec", [177, 178])
def test_new_firmware_needs_nothing(mec: int) -> None:
    [finding] = look(planned(), shown(mec))
    assert (finding.status, finding.value) == ("ok", f"MEC firmware {mec}")
    assert finding.unverified_on_hardware


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (shown(176), "MEC firmware 176, and"),
        (shown("?"), "MEC firmware unknown: rocm-smi shows no MEC line with a number, and"),
        (Output(2, "", "no driver"), "MEC firmware unknown: rocm-smi ended with 2: no driver, and"),
        (Output(None, "", "No such file or directory"), "rocm-smi cannot be run (No such file or directory), and"),
    ],
)
def test_old_or_unreadable_firmware_names_the_line_to_add(output: Output, value: str) -> None:
    [finding] = look(planned(), output)
    assert (finding.status, finding.check) == ("warning", "firmware")
    assert value in finding.value
    assert f"{SWITCH} is not 1 for prefill-0, decode-0" in finding.value
    assert f"set engine.env.{SWITCH}: 1" in str(finding.fix)


def test_where_the_recipe_or_the_image_sets_the_switch_old_firmware_is_right() -> None:
    assert [finding.status for finding in look(planned({SWITCH: 1}), shown(155))] == ["ok"]
    assert [finding.status for finding in look(planned(), shown(155), **{SWITCH: "1"})] == ["ok"]
    overruled = look(planned({SWITCH: 0}), shown(155), **{SWITCH: "1"})
    assert [finding.status for finding in overruled] == ["warning"]


def test_other_platforms_and_nodes_without_engines_are_not_asked() -> None:
    def never(_: tuple[str, ...]) -> Output:
        raise AssertionError("rocm-smi was run")

    cuda, rocm = planned(platform="cuda"), planned()
    assert find_firmware(cuda, "host0", cuda.processes, {}, never) == []
    assert find_firmware(rocm, "host0", [rocm.process("proxy")], {}, never) == []
