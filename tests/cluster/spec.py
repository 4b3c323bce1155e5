"""What a cluster consists of, as data: the test process writes it, the sandbox reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

NETWORK = "10.77."
LOGIN = "pdctl"
"""The controller and login node; the switch of the network lives there too."""


@dataclass(frozen=True)
class SlurmSettings:
    """Times in seconds, short where Slurm's own defaults (in brackets) would make tests wait, and not so short that a
    busy machine is taken for a dead one.

    `more` are further lines of slurm.conf.
    """

    kill_wait: int = 30
    slurmd_timeout: int = 15  # (300)
    message_timeout: int = 6  # (10)
    tcp_timeout: int = 2  # (2)
    unkillable_step_timeout: int = 30  # (60)
    cpus: int = 16
    memory_mib: int = 65536
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One cluster. `prefix` + number is a node's name; `shm` a size as tmpfs takes it."""

    prefix: str
    count: int
    folder: Path
    packages: Path
    slurm: SlurmSettings | None = field(default_factory=SlurmSettings)
    ssh: bool = True
    gpus: int = 8
    shm: str = "3g"
    networks: int = 1
    layers: tuple[Path, ...] = ()
    """Folders whose `usr` is laid over /usr besides `packages`."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Without the login node."""
        return tuple(f"{self.prefix}{index}" for index in range(self.count))

    @property
    def everybody(self) -> tuple[str, ...]:
        return (LOGIN, *self.nodes)

    def address(self, node: str, network: int = 0) -> str:
        """10.77.N.1 is the login node, 10.77.N.(10+I) node I; network N is the interface ethN of a node."""
        return f"{NETWORK}{network}.{1 if node == LOGIN else 10 + self.nodes.index(node)}"

    @property
    def etc(self) -> Path:
        """Laid over /etc inside the sandbox."""
        return self.folder / "etc"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def keys(self) -> Path:
        return self.folder / "ssh"

    def write(self) -> None:
        (self.folder / "spec.json").write_text(json.dumps(asdict(self), default=str, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Spec:
        values = json.loads((folder / "spec.json").read_text())
        values |= {name: Path(values[name]) for name in ("folder", "packages")}
        values["layers"] = tuple(map(Path, values["layers"]))
        if (slurm := values["slurm"]) is not None:
            values["slurm"] = SlurmSettings(**slurm | {"more": tuple(slurm["more"])})
        return cls(**values)
