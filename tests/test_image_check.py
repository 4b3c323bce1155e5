"""What an image must have (containers/*.Dockerfile), checked against this environment and made-up ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.installed import image_check
from tests.plan.kit import VERSIONS

CONTAINERS = Path(__file__).parents[1] / "containers"


def lacking(monkeypatch: pytest.MonkeyPatch, platform: str, *, kernels: str | None, wheel: str) -> str:
    """Of an environment with these kernels of LMCache and this wheel of Mooncake."""
    monkeypatch.setattr(image_check, "compiled_for", lambda: kernels)
    monkeypatch.setattr(image_check, "version_of", lambda name: "1" if name == wheel else None)
    monkeypatch.setattr(
        image_check, "installed", lambda: dict.fromkeys(("vllm", "lmcache", "mooncake", "pdserve"), "1")
    )
    monkeypatch.setattr("pdserve.installed.compiled.how", lambda: "compiled")
    monkeypatch.setattr(image_check, "_not_imported", lambda *modules: iter(()))
    monkeypatch.setattr(image_check, "_has_plugin", lambda: True)
    return "\n".join(image_check.lacking(platform))


@pytest.mark.parametrize(
    ("platform", "kernels", "wheel"),
    [
        ("cuda", "cuda", "mooncake-transfer-engine"),
        ("cuda", "cuda", "mooncake-transfer-engine-cuda13"),
        ("rocm", "hip", "mooncake-transfer-engine-rocm"),
        ("cpu", "cuda", "mooncake-transfer-engine-non-cuda"),
    ],
)
def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, platform: str, kernels: str, wheel: str) -> None:
    assert lacking(monkeypatch, platform, kernels=kernels, wheel=wheel) == ""


def test_rocm_takes_neither_kernels_for_cuda_nor_a_mooncake_that_reads_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = lacking(monkeypatch, "rocm", kernels="cuda", wheel="mooncake-transfer-engine-non-cuda")
    assert "the kernels of LMCache are for cuda, and rocm needs hip" in text
    assert "mooncake-transfer-engine-non-cuda cannot copy memory of rocm devices" in text


def test_a_platform_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["image_check", "tpu"])
    assert image_check.main() == 2
    assert "cpu|cuda|rocm" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_each_dockerfile_ends_with_its_check_and_compiles_pdserve(platform: str) -> None:
    text = (CONTAINERS / f"{platform}.Dockerfile").read_text()
    assert f"-m pdserve.installed.image_check {platform}" in text
    assert "PDSERVE_COMPILE=1" in text
    for copied in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for path in copied.split():
            assert (CONTAINERS.parent / path).exists(), path


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_the_versions_are_those_that_pdserve_knows(platform: str) -> None:
    pinned = dict(re.findall(r"^ARG (\w+)=v?(\S+)$", (CONTAINERS / f"{platform}.Dockerfile").read_text(), re.MULTILINE))
    assert pinned["LMCACHE"] == VERSIONS.lmcache
    assert pinned["MOONCAKE"] == VERSIONS.mooncake
    assert re.fullmatch(r"0\.\d+\.\d+", pinned["VLLM"])
