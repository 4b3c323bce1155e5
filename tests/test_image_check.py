"""What an image must have (containers/*.Dockerfile), checked against made-up environments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdserve.installed import image_check
from pdserve.installed.distributions import MooncakeBuild
from tests.tables import each_row


def lacking(monkeypatch: pytest.MonkeyPatch, platform: str, *, kernels: str | None, wheel: str) -> str:
    """Of an environment with these kernels of LMCache and this wheel of Mooncake."""
    monkeypatch.setattr(image_check, "lmcache_kernels", lambda: kernels)
    monkeypatch.setattr(image_check, "version_of", lambda name: "1" if name == wheel else None)
    monkeypatch.setattr(
        image_check, "installed", lambda: dict.fromkeys(("vllm", "lmcache", "mooncake", "pdserve"), "1")
    )
    monkeypatch.setattr(image_check, "proxy_build", lambda: "compiled")
    monkeypatch.setattr(image_check, "_not_imported", lambda *modules: iter(()))
    monkeypatch.setattr(image_check, "entry_points", lambda group: [SimpleNamespace(name="pdserve")])
    return "\n".join(image_check.find_shortcomings(platform))


@each_row("platform, kernels, wheel", [
    ("cuda", "cuda", "mooncake-transfer-engine-cuda13"),
    ("rocm", "hip", "mooncake-transfer-engine-rocm"),
    ("cpu", "cuda", "mooncake-transfer-engine-non-cuda"),
])  # fmt: skip
def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, platform: str, kernels: str, wheel: str) -> None:
    assert lacking(monkeypatch, platform, kernels=kernels, wheel=wheel) == ""


def test_rocm_takes_nothing_that_was_built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    text = lacking(monkeypatch, "rocm", kernels="cuda", wheel="mooncake-transfer-engine-non-cuda")
    assert "the kernels of LMCache are for cuda, and rocm needs hip" in text
    assert "mooncake-transfer-engine-non-cuda cannot copy memory of rocm devices" in text


def build(cuda: str, *wheels: str) -> MooncakeBuild:
    """One beside a torch for CUDA 13."""
    return MooncakeBuild(device="cuda", cuda=cuda, torch_cuda="13", distributions=wheels)


def test_a_mooncake_for_another_cuda_than_torch_does_not_belong_to_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = "mooncake-transfer-engine"
    monkeypatch.setattr(image_check, "find_mooncake_build", lambda: build("12", wheel))
    text = lacking(monkeypatch, "cuda", kernels="cuda", wheel=wheel)
    assert "built for CUDA 12, and torch brings CUDA 13: install mooncake-transfer-engine-cuda13" in text
    monkeypatch.setattr(image_check, "find_mooncake_build", lambda: build("13", wheel))
    assert lacking(monkeypatch, "cuda", kernels="cuda", wheel=wheel) == ""


def test_two_wheels_of_mooncake_do_not_belong_to_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip leaves them: the second one has overwritten the files of the first."""
    lacking(monkeypatch, "cuda", kernels="cuda", wheel="")
    monkeypatch.setattr(
        image_check, "version_of", lambda name: "1" if name in image_check.MOONCAKE["cuda"][:2] else None
    )
    assert "have the same files" in "\n".join(image_check.find_shortcomings("cuda"))


@each_row("requirement, said", [
    ("packaging>=24.0", ""), ("packaging>=24.0; extra == 'dev'", ""),
    ("no-such-package>=1; extra == 'dev'", ""),
    ("no-such-package>=1; python_version < '3'", ""),
    ("no-such-package>=1", "no-such-package is not installed, and pdserve needs it"),
    ("packaging>=9999", "and pdserve needs >=9999"),
])  # fmt: skip
def test_what_pdserve_imports_belongs_to_it(monkeypatch: pytest.MonkeyPatch, requirement: str, said: str) -> None:
    """pip can install it without (`--no-deps`); its proxy would end with the first import."""
    monkeypatch.setattr(image_check, "requires", lambda _: [requirement])
    text = lacking(monkeypatch, "cpu", kernels="cuda", wheel="mooncake-transfer-engine-non-cuda")
    assert text.endswith(said)
    assert bool(text) == bool(said)
