"""The fabric check: which pairs of nodes will move KV by the plan, their transfers over the probes, and the judgement.

All waiting ends begin, then rounds of transfers follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.preflight.engine_packages import ONLY_ITS_RUNTIME, mooncake_replacement
from pdserve.preflight.finding import ALL_NODES, Finding, NodeNeed, failures
from pdserve.preflight.node_probe import Answer, HasSent, Question, Send, Wait, Waits
from pdserve.preflight.transfer import End, EndFailure, FabricPath, Link, TransferOutcome, WaitingEnd
from pdserve.recipe.base import TrialTransfer

MOST_ROUNDS = 8
"""Each round takes about two seconds: a node is tried with so many others, not with all of a hundred."""
_MIB = 1 << 20
_LEAST_SHARE = 0.1
"""Of what the link should give: one sender does not fill a fast one."""
_NO_DEVICE_TRANSPORT = "does not enable CUDA memory support"
"""NIXL 1.5.1, on a machine with a device of NVIDIA."""
_NETWORK = "network: {interface: NAME} or {cidr: A.B.C.D/N}"
_NEVER_RAN = (
    "; if the engines do move KV there, fabric.check: false leaves out this check, which never ran on RDMA or in "
    "device memory of ROCm"
)
_PAIRS = NodeNeed(ALL_NODES, "fabric", "a transfer for each pair of nodes")
AnswerT = TypeVar("AnswerT", bound=Answer)


class Wish(Frozen):
    """A wish for the fabric check."""

    python: str | None = None
    """The engines' interpreter; None: the one that runs the probe."""
    min_gbps: float | None = None
    """Less fails; None: any rate will do."""
    rails: bool = False
    """Each RDMA device that the recipe names is tried by itself."""


class FabricProbe(Protocol):
    """A probe, as far as it is needed here."""

    async def ask(self, question: Question, kind: type[AnswerT]) -> AnswerT: ...


_Place = tuple[str, str]
"""Node and devices of a waiting end: there is one for each device that is tried by itself."""


async def try_fabric(
    probes: Mapping[str, FabricProbe], plan: Plan, wish: Wish, reached: Sequence[Finding]
) -> list[Finding]:
    """Try a transfer for each pair of nodes. Raises PreflightError when a probe does not answer.

    `reached`: whether the nodes reach each other at all; where they do not, the transfers would only repeat it."""
    if failures(reached):
        value = "no transfer was tried: nodes do not reach each other"
        return [_PAIRS.found("unknown", value, "correct the findings about reach first")]
    if (untried := find_untried(plan)) is not None:
        return [untried]
    wanted = split_by_rail(paths(plan)) if wish.rails else list(paths(plan))
    waiting: dict[str, dict[_Place, FabricPath]] = {}
    for path in wanted:
        waiting.setdefault(path.waiting.node, {})[_place(path)] = path
    begun = await asyncio.gather(*(_begin(probes[node], here, wish.python) for node, here in waiting.items()))
    findings, there = [], dict[_Place, WaitingEnd]()
    for path, answer in chain.from_iterable(begun):
        if answer.waiting is not None:
            there[_place(path)] = answer.waiting
        elif answer.failure is not None:
            findings.append(judge_end(path.waiting, answer.failure))
    in_rounds = rounds([path for path in wanted if _place(path) in there])
    done: list[tuple[FabricPath, TransferOutcome]] = []
    for some in in_rounds[:MOST_ROUNDS]:
        sends = [Send(path=path, to=there[_place(path)], python=wish.python) for path in some]
        answers = await asyncio.gather(*(probes[each.path.caller.node].ask(each, HasSent) for each in sends))
        done += [(path, answer.sent) for path, answer in zip(some, answers, strict=True)]
    for path, sent in done:
        findings += judge_path(path, there[_place(path)], sent, min_gbps=wish.min_gbps)
    return [*findings, *judge_rails(done), *judge_untried(len(done), sum(map(len, in_rounds)))]


def _place(path: FabricPath) -> _Place:
    return path.waiting.node, path.waiting.devices


async def _begin(
    probe: FabricProbe, here: Mapping[_Place, FabricPath], python: str | None
) -> list[tuple[FabricPath, Waits]]:
    """Begin all waiting ends of a node; a probe answers one question at a time."""
    return [
        (path, await probe.ask(Wait(end=path.waiting, is_read=path.reads, python=python), Waits))
        for path in here.values()
    ]


def paths(plan: Plan) -> tuple[FabricPath, ...]:
    """Return each pair of nodes once; what stays on a node is not here."""
    pairs = {
        (source.node, target.node): FabricPath(source=source, target=target, reads=trial.pulled)
        for target, trial in _ends(plan, "decode")
        for source, _ in _ends(plan, "prefill")
        if source.node != target.node and source.connector == target.connector
    }
    return tuple(pairs.values())


def _ends(plan: Plan, role: str) -> Iterator[tuple[End, TrialTransfer]]:
    """Return for each node the first of its engines of that role."""
    seen = set()
    for process in plan.processes:
        for connector in process.connectors:
            trial = connector.trial
            if process.role != role or trial is None or process.node in seen:
                continue
            if trial.ports not in {*process.ports, *process.port_ranges}:
                continue
            seen.add(process.node)
            over_tcp = connector.rdma_devices is None
            end = End(
                node=process.node,
                address=plan.node(process.node).address,
                connector=connector.class_name,
                engine=trial.engine,
                platform=plan.platform,
                on_device=plan.platform != "cpu" and not trial.host_buffer,
                protocol="ucx" if trial.engine == "nixl" else "tcp" if over_tcp else "rdma",
                devices=",".join(connector.rdma_devices or ()),
                environment=process.env.set,
                process=process.name,
            )
            yield end, trial


def split_by_rail(wanted: Sequence[FabricPath]) -> list[FabricPath]:
    """Return each path once for each of its rails: the first device of both ends, the second, and so on."""
    railed = []
    for path in wanted:
        ours, theirs = (end.devices.split(",") for end in (path.source, path.target))
        if len(ours) != len(theirs) or len(ours) < 2:
            railed.append(path)
            continue
        for here, there in zip(ours, theirs, strict=True):
            source = path.source.model_copy(update={"devices": here})
            target = path.target.model_copy(update={"devices": there})
            rail = here if here == there else f"{here} and {there}"
            railed.append(path.model_copy(update={"source": source, "target": target, "rail": rail}))
    return railed


def rounds(wanted: Sequence[FabricPath]) -> list[list[FabricPath]]:
    """Return each path once, in rounds in which no node is the source or the target of two: they would share its link.

    All rails of a pair come before another pair of its nodes."""
    sources = list(dict.fromkeys(path.source.node for path in wanted))
    targets = list(dict.fromkeys(path.target.node for path in wanted))
    width = max(len(sources), len(targets))
    done: dict[tuple[int, str | None], list[FabricPath]] = {}
    for path in wanted:
        shift = (targets.index(path.target.node) - sources.index(path.source.node)) % width
        done.setdefault((shift, path.rail), []).append(path)
    return list(done.values())


def find_untried(plan: Plan) -> Finding | None:
    """Say why this plan has nothing to try; None: it has."""
    if paths(plan):
        return None
    connectors = [connector for process in plan.processes for connector in process.connectors]
    if any(connector.trial is not None for connector in connectors):
        value = "no transfer was tried: no prefill and decode are on different nodes"
        return _PAIRS.found("unknown", value, "pdserve verify RECIPE")
    kinds = sorted({connector.class_name for connector in connectors})
    value = f"no transfer was tried: the connectors of the plan are {', '.join(kinds) or 'none'}"
    fix = "only Mooncake and NIXL over UCX are tried: start the deployment, and pdserve verify proves its transfers"
    return _PAIRS.found("unknown", value, fix)


def judge_untried(tried: int, wanted: int) -> list[Finding]:
    """Judge what the limit of rounds has left out."""
    if tried == wanted:
        return []
    value = f"{tried} of {wanted} transfers were tried, each node with some of the others"
    return [_PAIRS.found("unknown", value, "pdserve verify RECIPE, once it serves")]


def judge_end(end: End, failure: EndFailure) -> Finding:
    """Judge an end that could not begin: nothing of it could be tried."""
    text = f"the transfer engine of {end.connector} with {end.protocol} at {end.address}"
    text += f" on {end.devices}" if end.devices else ""
    need = NodeNeed(end.node, "fabric", text, unverified=_is_unverified(end))
    return _judge_failure(need, end, failure, f"{failure.step} failed: {failure.error}")


def judge_path(path: FabricPath, to: WaitingEnd, sent: TransferOutcome, *, min_gbps: float | None) -> list[Finding]:
    """Judge a transfer that was tried."""
    does = "reads from" if path.reads else "writes to"
    memory = " to ".join("device memory" if end.on_device else "host memory" for end in (path.source, path.target))
    text = f"{path}: {path.caller.connector} with {path.caller.protocol} {does} {path.waiting.address}, {memory}"
    if sent.unreachable:
        return [_judge_unreachable(_need(path, text), path, to, sent)]
    if sent.failure is not None:
        port = f", port {to.session_port}" if to.session_port else ""
        value = f"{path}{port}: {sent.failure.step} failed: {sent.failure.error}"
        return [_judge_failure(_need(path, text), path.caller, sent.failure, value), *_judge_route(path, sent)]
    return [_judge_rate(path, to, sent, text, min_gbps), *_judge_route(path, sent), *_judge_mtu(path, to, sent)]


def _need(path: FabricPath, text: str) -> NodeNeed:
    unverified = _is_unverified(path.source) or _is_unverified(path.target)
    return NodeNeed(path.caller.node, "fabric", text, unverified=unverified)


def _is_unverified(end: End) -> bool:
    return end.protocol == "rdma" or (end.on_device and end.platform == "rocm")


def _fails(need: NodeNeed, value: str, fix: str, evidence: Sequence[str]) -> Finding:
    return need.found("failed", value, fix + (_NEVER_RAN if need.unverified else ""), evidence)


def _judge_failure(need: NodeNeed, end: End, failure: EndFailure, value: str) -> Finding:
    cause, fix = _cause_and_fix(end, failure)
    evidence = (f"likely cause: {cause}", *failure.output)
    # Without memory of a device nothing was tried.
    return (
        need.found("unknown", value, fix, evidence) if failure.step == "device" else _fails(need, value, fix, evidence)
    )


def judge_rails(done: Sequence[tuple[FabricPath, TransferOutcome]]) -> list[Finding]:
    """Judge the rails between two nodes that move less than half of what the fastest rail does."""
    pairs: dict[tuple[str, str], list[tuple[FabricPath, float]]] = {}
    for path, sent in done:
        if path.rail is not None and sent.timings:
            pairs.setdefault((path.source.node, path.target.node), []).append((path, sent.gbps))
    findings = []
    for rails in pairs.values():
        best, most = max(rails, key=lambda each: each[1])
        for path, rate in rails:
            if rate < most / 2:
                value = f"{path}: {rate:.3g} Gbit/s, and {most:.3g} by {best.rail}"
                fix = f"look at cable, switch and error counters of {path.rail}, or leave it out of device_name"
                findings.append(_need(path, "rails of about one rate").found("warning", value, fix))
    return findings


def _links(path: FabricPath, to: WaitingEnd, sent: TransferOutcome) -> tuple[Link | None, Link | None]:
    """Return the links of the source and of the target."""
    return (to.link, sent.link) if path.reads else (sent.link, to.link)


def _judge_rate(path: FabricPath, to: WaitingEnd, sent: TransferOutcome, text: str, min_gbps: float | None) -> Finding:
    (size, seconds), (small, small_seconds) = sent.timings[-1], sent.timings[0]
    links = _links(path, to, sent)
    known = [link.gbps for link in links if link is not None and link.gbps is not None]
    nominal = min(known) if len(known) == len(links) else None
    value = (
        f"{path}: {sent.gbps:.3g} Gbit/s{'' if nominal is None else f' of {nominal:g}'} "
        f"({size / _MIB:.3g} MiB in {seconds * 1000:.3g} ms), {small >> 10} KiB in "
        f"{small_seconds * 1000:.1f} ms, connected in {sent.connect_seconds * 1000:.1f} ms; "
        f"{' -> '.join(map(_shown, links))}"
    )
    cause = "likely cause: a slow or shared link, or an interface that is not the fast one"
    if path.source.protocol != "rdma":
        cause += "; one connection over TCP may be slower than the link"
    if min_gbps is None and nominal is not None and sent.gbps < nominal * _LEAST_SHARE:
        fix = (
            "look at the error counters of both interfaces (ip -s link) and at what else uses the link; set "
            "fabric.min_gbps to what is enough here"
        )
        need = _need(path, f"{text}, at about the {nominal:g} Gbit/s of its link")
        return need.found("warning", value, fix, (cause,))
    if min_gbps is None or sent.gbps >= min_gbps:
        return _need(path, text).found("ok", value)
    fix = f"name the fast network ({_NETWORK}), or lower fabric.min_gbps (--min-gbps)"
    return _fails(_need(path, f"{text}, at least {min_gbps:g} Gbit/s"), value, fix, (cause,))


def _judge_unreachable(need: NodeNeed, path: FabricPath, to: WaitingEnd, sent: TransferOutcome) -> Finding:
    ports = ", ".join(str(port) for port, _, _ in sent.unreachable)
    problems = ", ".join(dict.fromkeys(problem for _, problem, _ in sent.unreachable))
    there = path.waiting
    if there.engine == "nixl":
        which = "UCX takes any of the system's ports: open those of net.ipv4.ip_local_port_range between the nodes"
        fix = f"choose the network ({_NETWORK}); {which}, or set UCX_TCP_PORT_RANGE in engine.env and open that range"
    elif len(sent.unreachable) == len(to.ports):
        fix = f"choose the network ({_NETWORK}), or open the transfer ports of {there.process} (ports.transfer)"
    else:
        fix = f"open TCP {ports} on {there.node}, as all transfer ports of {there.process} (ports.transfer)"
    evidence = [f"port {port}: {problem}; {cause}" for port, problem, cause in sent.unreachable]
    route = [finding.value for finding in _judge_route(path, sent)]
    return _fails(need, f"{path} at {there.address}, port {ports}: {problems}", fix, evidence + route)


def _judge_route(path: FabricPath, sent: TransferOutcome) -> list[Finding]:
    here, there = path.caller, path.waiting
    if sent.leaves_by in (None, here.address):
        return []
    way = f"from {here.node} to {there.node}: " if path.reads else ""
    value = f"{path}: {way}packets leave from {sent.leaves_by}, not from {here.address} ({_shown(sent.link)})"
    fix = f"name the network that both nodes have ({_NETWORK}), or correct the route to {there.address}"
    return [_need(path, "KV on the network of the deployment").found("warning", value, fix)]


def _judge_mtu(path: FabricPath, to: WaitingEnd, sent: TransferOutcome) -> list[Finding]:
    ours, theirs = _links(path, to, sent)
    if ours is None or theirs is None or ours.mtu == theirs.mtu:
        return []
    value = f"{path}: MTU {ours.mtu} on {ours.name}, {theirs.mtu} on {theirs.name}"
    need = _need(path, "one MTU on both ends: large packets are lost or cut otherwise")
    fix = f"ip link set dev {theirs.name} mtu {ours.mtu} on {path.target.node}, if the switches carry it"
    return [need.found("warning", value, fix)]


def _shown(link: Link | None) -> str:
    return "an unknown interface" if link is None else f"{link.name} (MTU {link.mtu})"


def _cause_and_fix(end: End, failure: EndFailure) -> tuple[str, str]:
    if failure.step == "initialize":
        return _why_not_initialized(end, failure)
    if failure.step == "register" and failure.memlock is not None:
        return (
            f"RDMA locks what it registers, and {failure.memlock // 1024} KiB may be locked",
            "ulimit -l unlimited where pdserve starts (docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity "
            "for slurmd)",
        )
    if failure.step in ("register", "transfer") and end.on_device:
        return _why_not_device_memory(end)
    name, package = ("NIXL", "nixl") if end.engine == "nixl" else ("Mooncake", "mooncake")
    causes: dict[str, tuple[str, str]] = {
        "import": (
            f"{name}, or a system library of it, is not there for the engines' interpreter",
            f"pip install the {package} package there; correct engine.python, or LD_LIBRARY_PATH in engine.env",
        ),
        "device": (
            "torch has no device there, the driver is not loaded, or another process has all its memory",
            "see the findings about devices; correct devices_per_node, or the image",
        ),
        "register": ("the device refuses the memory", "read the engine's own lines below"),
        "compare": (
            "what arrived is not what was sent: defective memory, adapter or driver",
            f"leave a node out with exclude_nodes: [{end.node}] and try again; check the adapter's error counters",
        ),
        "start": ("the interpreter of the engines cannot run there", "correct engine.python; read the lines below"),
        "transfer": (
            "the link drops or delays what is large (a cut link, a different MTU on the way), or is far too slow",
            f"compare MTU and error counters of both interfaces (ip -s link), or name another network ({_NETWORK})",
        ),
    }
    return causes.get(failure.step, causes["transfer"])


def _why_not_initialized(end: End, failure: EndFailure) -> tuple[str, str]:
    if end.protocol == "rdma":
        return (
            "no usable RDMA device, or its link is down, or no permission on /dev/infiniband",
            "see the findings about rdma; correct device_name of the connector, or set protocol: tcp",
        )
    if any(_NO_DEVICE_TRANSPORT in line for line in failure.output):
        return (
            "UCX_TLS leaves out device memory",
            "add cuda_copy to UCX_TLS in engine.env (cuda_ipc too, for NVLink and one node)",
        )
    if end.engine == "nixl":
        return (
            "UCX found no transport or network device that it may use",
            "correct UCX_TLS and UCX_NET_DEVICES in engine.env; `ucx_info -d` lists what there is",
        )
    return (
        f"{end.address} is not an address of {end.node}, or no port of the range of {end.process} is free",
        "correct the network, or move the range with ports.transfer",
    )


def _why_not_device_memory(end: End) -> tuple[str, str]:
    if end.engine == "mooncake" and end.protocol == "tcp":
        return ONLY_ITS_RUNTIME, mooncake_replacement(end.platform)
    module = "nvidia_peermem" if end.platform == "cuda" else "amdgpu with peer memory (or ib_peer_mem)"
    return (
        f"the adapter cannot reach device memory: neither {module} nor dmabuf, or a build of the transfer engine "
        "without support for the device",
        "see the findings about rdma; load the module on the host (modprobe), or use a kernel and a driver with dmabuf",
    )
