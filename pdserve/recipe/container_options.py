"""Options of `docker run`, `apptainer exec` and srun's pyxis: as a recipe writes them, and how they meet pdserve's own.

An option that may stand several times (`--device`, `--ulimit`, `-v`, ...) is added. One that stands once, and the same
device, limit or capability again, takes the place of pdserve's. `container.leave_out` takes one of pdserve's away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pdserve.recipe import effective
from pdserve.recipe.base import SecretRef
from pdserve.recipe.connectors.base import Config, Context
from pdserve.recipe.connectors.registry import KINDS, AnyConnector, RawSection, leaf_configs
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Kind
from pdserve.roles import EngineRole

VERBS = "/dev/infiniband"
"""The folder of the device files that RDMA is used through."""


def uses_rdma(recipe: Recipe) -> bool:
    """Return True where a connector of any role moves KV by RDMA, by its own default too."""
    for name, role, connector in effective.roles(recipe):
        variables = _variables(connector, effective.env_of(recipe, role))
        for config in _configs(recipe, name, connector):
            kind = KINDS.get(str(config.get("kv_connector", "")))
            if kind is not None and kind.rdma_devices(config, variables) is not None:
                return True
    return False


def _configs(recipe: Recipe, name: EngineRole, connector: AnyConnector | None) -> Iterator[Config]:
    for leaf in effective.leaf_connectors(connector):
        if isinstance(leaf, RawSection):
            yield from leaf_configs(leaf.config)
        elif not leaf.ABOUT.attaches_lmcache:  # its mapping needs the ports of a plan, and it reaches its own node only
            yield leaf.config(Context(name, recipe.platform, recipe.lmcache, ()))


def _variables(connector: AnyConnector | None, env: Mapping[str, object]) -> dict[str, str]:
    """Return what of the engines' environment decides: a connector's defaults, then the recipe's values."""
    defaults = [
        leaf.default_environment() for leaf in effective.leaf_connectors(connector) if not isinstance(leaf, RawSection)
    ]
    plain = {name: str(value) for name, value in env.items() if not isinstance(value, SecretRef)}
    return {**{name: value for setting in defaults for name, value in setting.items()}, **plain}


Platform = Literal["cpu", "cuda", "rocm"]
OPEN_FILES = 1048576
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(?:(?:=|\s+)(.*))?", re.DOTALL)
_SHORT = re.compile(r"-([A-Za-z])(?:(?:=|\s+)?(.+))?", re.DOTALL)
_LETTERS: dict[Kind, dict[str, str]] = {
    "docker": {
        "a": "attach",
        "c": "cpu-shares",
        "d": "detach",
        "e": "env",
        "h": "hostname",
        "i": "interactive",
        "l": "label",
        "m": "memory",
        "p": "publish",
        "t": "tty",
        "u": "user",
        "v": "volume",
        "w": "workdir",
    },
    "apptainer": {
        "B": "bind",
        "C": "containall",
        "c": "contain",
        "e": "cleanenv",
        "f": "fakeroot",
        "H": "home",
        "n": "net",
        "o": "overlay",
        "p": "pid",
        "S": "scratch",
        "u": "userns",
        "w": "writable",
        "W": "workdir",
    },
    "pyxis": {"N": "nodes", "n": "ntasks", "w": "nodelist"},
}
"""docker(1) 20.10 and apptainer(1) 1.3. pyxis has long options only; of srun's, those that pdserve sets are known."""
_SWITCHES = frozenset(
    {
        *("privileged", "rm", "init", "interactive", "tty", "detach", "read-only", "publish-all", "no-healthcheck"),
        *("oom-kill-disable", "quiet", "nv", "nvccli", "rocm", "no-home", "cleanenv", "fakeroot", "writable"),
        *("writable-tmpfs", "contain", "containall", "compat", "userns", "pid", "net", "uts", "no-privs", "keep-privs"),
        *("container-mount-home", "container-writable", "container-readonly", "container-remap-root", "overlap"),
    }
)
"""Options without a value: a word after them is not theirs."""
_DEVICES: dict[Kind, dict[Platform, tuple[str, ...]]] = {
    "docker": {
        "cpu": (),
        "cuda": ("--gpus=all",),
        # AMD's own list for vLLM: ptrace and the calls that seccomp forbids are how ranks map each other's memory.
        "rocm": (
            "--device=/dev/kfd",
            "--device=/dev/dri",
            "--security-opt=seccomp=unconfined",
            "--cap-add=SYS_PTRACE",
        ),
    },
    "apptainer": {"cpu": (), "cuda": ("--nv",), "rocm": ("--rocm",)},
    "pyxis": {"cpu": (), "cuda": (), "rocm": ()},
}
_ALWAYS: dict[Kind, tuple[str, ...]] = {
    "docker": (f"--ulimit=nofile={OPEN_FILES}:{OPEN_FILES}", "--ulimit=memlock=-1:-1"),
    "apptainer": (),
    "pyxis": ("--no-container-mount-home", "--no-container-entrypoint", "--container-writable"),
}
_OF_THE_NODE: dict[Kind, tuple[str, ...]] = {"docker": ("user", "group-add"), "apptainer": (), "pyxis": ()}
"""Options whose values are the user's on the node: no recipe can know them."""


class Option(NamedTuple):
    """One option by its long name; `value` None: it stands alone."""

    name: str
    value: str | None

    @property
    def word(self) -> str:
        """Return the option as a command line takes it."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def read(kind: Kind, options: Sequence[str]) -> list[tuple[int, Option | None]]:
    """Return each option with the index of the item that it begins at; None for an item that is none. `--name=value`,
    `--name value`, two items, `-v value` and `-v=value` are the same."""
    items: list[tuple[int, Option | None]] = []
    for index, text in enumerate(options):
        last = items[-1][1] if items else None
        if not text.startswith("-") and last is not None and last.value is None and last.name not in _SWITCHES:
            items[-1] = (items[-1][0], last._replace(value=text))
        else:
            items.append((index, _option(kind, text)))
    return items


def _option(kind: Kind, text: str) -> Option | None:
    if (match := _LONG.fullmatch(text)) is not None:
        return Option(match.group(1), match.group(2))
    if (match := _SHORT.fullmatch(text)) is not None and (name := _LETTERS[kind].get(match.group(1))) is not None:
        return Option(name, match.group(2))
    return None


def valid_options(kind: Kind, options: Sequence[str]) -> list[Option]:
    """Return the options of a recipe whose rules hold."""
    return [option for _, option in read(kind, options) if option is not None]


def defaults(kind: Kind, platform: Platform, *, rdma: bool) -> tuple[str, ...]:
    """Return the options that pdserve sets on every node of a platform. pyxis and apptainer get RDMA by a mount."""
    verbs = (f"--device={VERBS}",) if rdma and kind == "docker" else ()
    return (*_ALWAYS[kind], *_DEVICES[kind][platform], *verbs)


def can_be_left_out(kind: Kind, platform: Platform, *, rdma: bool) -> tuple[str, ...]:
    """Return what `container.leave_out` may name, for messages: whole words, and names without a value."""
    return (*defaults(kind, platform, rdma=rdma), *(f"--{name}" for name in _OF_THE_NODE[kind]))


def is_set(option: Option, kind: Kind, platform: Platform, *, rdma: bool) -> bool:
    """Tell whether pdserve sets an option, so that it can be left out."""
    ours = valid_options(kind, defaults(kind, platform, rdma=rdma))
    return option.name in _OF_THE_NODE[kind] or any(_leaves_out(option, our) for our in ours)


def merge_options(kind: Kind, ours: Sequence[str], options: Sequence[str], leave_out: Sequence[str] = ()) -> list[str]:
    """Return `ours` without those that an option replaces or that are left out, and then the options."""
    theirs, dropped = valid_options(kind, options), valid_options(kind, leave_out)
    taken = {_place(option) for option in theirs}
    kept = [
        option
        for option in valid_options(kind, ours)
        if _place(option) not in taken and not any(_leaves_out(drop, option) for drop in dropped)
    ]
    return [option.word for option in (*kept, *theirs)]


def _leaves_out(drop: Option, option: Option) -> bool:
    """Tell whether an option is left out: a name alone means all of that name."""
    same = _canonical(drop.name) == _canonical(option.name)
    return same and (drop.value is None or _place(drop) == _place(option))


def _place(option: Option) -> tuple[str, str]:
    """Return what only one option can have: for those that may stand several times, the thing that each is about."""
    name, value = option.name, option.value or ""
    match name:
        case "device":
            return name, value.partition(":")[0]
        case "ulimit":
            return name, value.partition("=")[0]
        case "security-opt":
            return name, value if value.startswith("label") else re.split("[=:]", value, maxsplit=1)[0]
        case "cap-add" | "cap-drop":
            return name, value.upper().removeprefix("CAP_")
        case _ if name in _REPEATABLE:
            return name, value
    return _canonical(name), ""


_REPEATABLE = frozenset(
    {
        *("group-add", "mount", "volume", "bind", "env", "label", "add-host", "dns", "sysctl", "tmpfs", "annotation"),
        *("device-cgroup-rule", "volumes-from", "expose", "publish", "overlay", "scratch", "security"),
    }
)


def _canonical(name: str) -> str:
    return name.removeprefix("no-").replace("readonly", "writable")


def targets(kind: Kind, options: Sequence[str]) -> Iterator[str]:
    """Yield paths inside at which the options mount something."""
    for option in valid_options(kind, options):
        value = option.value or ""
        if option.name in ("volume", "bind"):
            for mount in value.split(",") if option.name == "bind" else (value,):
                source, _, rest = mount.partition(":")
                yield rest.partition(":")[0] or source
        elif option.name == "mount":
            fields = dict(part.partition("=")[::2] for part in value.split(","))
            for key in ("target", "destination", "dst"):
                if key in fields:
                    yield fields[key]
