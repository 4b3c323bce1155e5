"""What became of the transfers, as findings with cause and fix: pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.preflight.accelerators.mooncake_wheel import ONLY_ITS_RUNTIME, replacement
from pdserve.preflight.fabric.ends import EndFailure, Link, Sent, WaitingEnd
from pdserve.preflight.fabric.paths import End, Path
from pdserve.preflight.finding import ALL_NODES, Finding, Status

_MIB = 1 << 20
_LEAST_SHARE = 0.1
"""Of what the link should give: one sender does not fill a fast one."""
_NO_DEVICE_TRANSPORT = "does not enable CUDA memory support"
"""NIXL 1.5.1, on a machine with a device of NVIDIA."""
_NETWORK = "network: {interface: NAME} or {cidr: A.B.C.D/N}"


def judge_end(end: End, failure: EndFailure) -> Finding:
    """Of an end that could not begin: nothing of it could be tried."""
    cause, fix = _cause_and_fix(end, failure)
    return _finding(
        end.node,
        _status(failure),
        f"{failure.step} failed: {failure.error}",
        f"the transfer engine of {end.connector} with {end.protocol} at {end.address}"
        + (f" on {end.devices}" if end.devices else ""),
        fix=fix,
        evidence=(f"likely cause: {cause}", *failure.output),
        unverified=_is_unverified(end),
    )


def judge_path(path: Path, to: WaitingEnd, sent: Sent, *, min_gbps: float | None) -> list[Finding]:
    """Of a transfer that was tried."""
    need = f"{path}: {_what(path)}"
    if sent.unreachable:
        return [_unreachable(path, to, sent, need)]
    if sent.failure is not None:
        cause, fix = _cause_and_fix(path.caller, sent.failure)
        port = f", port {to.session_port}" if to.session_port else ""
        value = f"{path}{port}: {sent.failure.step} failed: {sent.failure.error}"
        evidence = (f"likely cause: {cause}", *sent.failure.output)
        return [_of_path(path, _status(sent.failure), value, need, fix, evidence), *_route(path, sent)]
    return [_rate(path, to, sent, need, min_gbps), *_route(path, sent), *_mtu(path, to, sent)]


def judge_rails(done: Sequence[tuple[Path, Sent]]) -> list[Finding]:
    """Of the rails of a pair of nodes those that move less than half of what the fastest one does."""
    pairs: dict[tuple[str, str], list[tuple[Path, float]]] = {}
    for path, sent in done:
        if path.rail is not None and sent.timings:
            pairs.setdefault((path.source.node, path.target.node), []).append((path, gbps(sent)))
    findings = []
    for rails in pairs.values():
        best, most = max(rails, key=lambda each: each[1])
        for path, rate in rails:
            if rate < most / 2:
                value = f"{path}: {rate:.3g} Gbit/s, and {most:.3g} by {best.rail}"
                fix = f"look at cable, switch and error counters of {path.rail}, or leave it out of device_name"
                findings.append(_of_path(path, "warning", value, "rails of about one rate", fix))
    return findings


def judge_untried(tried: int, wanted: int) -> list[Finding]:
    """What the limit of rounds has left out."""
    if tried == wanted:
        return []
    value = f"{tried} of {wanted} transfers were tried, each node with some of the others"
    need = "a transfer for each pair of nodes, by each of its rails"
    return [_finding(ALL_NODES, "unknown", value, need, fix="pdserve verify RECIPE, once it serves", unverified=False)]


def gbps(sent: Sent) -> float:
    """Of the largest write, in 10^9 bits a second. 0 when nothing was written."""
    size, seconds = sent.timings[-1] if sent.timings else (0, 1.0)
    return size * 8 / seconds / 1e9


def _rate(path: Path, to: WaitingEnd, sent: Sent, need: str, min_gbps: float | None) -> Finding:
    size, seconds = sent.timings[-1]
    small, small_seconds = sent.timings[0]
    rate, nominal = gbps(sent), _nominal(to.link, sent.link)
    value = (
        f"{path}: {rate:.3g} Gbit/s{'' if nominal is None else f' of {nominal:g}'} "
        f"({size / _MIB:.3g} MiB in {seconds * 1000:.3g} ms), {small >> 10} KiB in "
        f"{small_seconds * 1000:.1f} ms, connected in {sent.connect_seconds * 1000:.1f} ms; "
        f"{' -> '.join(map(_shown, (to.link, sent.link) if path.reads else (sent.link, to.link)))}"
    )
    cause = "likely cause: a slow or shared link, or an interface that is not the fast one"
    if path.source.protocol != "rdma":
        cause += "; one connection over TCP may be slower than the link"
    if min_gbps is None and nominal is not None and rate < nominal * _LEAST_SHARE:
        return _of_path(
            path,
            "warning",
            value,
            f"{need}, at about the {nominal:g} Gbit/s of its link",
            "look at the error counters of both interfaces (ip -s link) and at what else uses the link; set "
            "fabric.min_gbps to what is enough here",
            (cause,),
        )
    if min_gbps is None or rate >= min_gbps:
        return _of_path(path, "ok", value, need)
    return _of_path(
        path,
        "failed",
        value,
        f"{need}, at least {min_gbps:g} Gbit/s",
        f"name the fast network ({_NETWORK}), or lower fabric.min_gbps (--min-gbps)",
        (cause,),
    )


def _unreachable(path: Path, to: WaitingEnd, sent: Sent, need: str) -> Finding:
    ports = ", ".join(str(port) for port, _, _ in sent.unreachable)
    problems = ", ".join(dict.fromkeys(problem for _, problem, _ in sent.unreachable))
    there = path.waiting
    value = f"{path} at {there.address}, port {ports}: {problems}"
    if there.engine == "nixl":
        which = "UCX takes any of the system's ports: open those of net.ipv4.ip_local_port_range between the nodes"
        fix = f"choose the network ({_NETWORK}); {which}, or set UCX_TCP_PORT_RANGE in engine.env and open that range"
    elif len(sent.unreachable) == len(to.ports):
        fix = f"choose the network ({_NETWORK}), or open the transfer ports of {there.process} (ports.transfer)"
    else:
        fix = f"open TCP {ports} on {there.node}, as all transfer ports of {there.process} (ports.transfer)"
    evidence = tuple(f"port {port}: {problem}; {cause}" for port, problem, cause in sent.unreachable)
    route = tuple(finding.value for finding in _route(path, sent))
    return _of_path(path, "failed", value, need, fix, (*evidence, *route))


def _route(path: Path, sent: Sent) -> list[Finding]:
    here, there = path.caller, path.waiting
    if sent.leaves_by in (None, here.address):
        return []
    way = f"from {here.node} to {there.node}: " if path.reads else ""
    value = f"{path}: {way}packets leave from {sent.leaves_by}, not from {here.address} ({_shown(sent.link)})"
    need = "KV on the network of the deployment"
    fix = f"name the network that both nodes have ({_NETWORK}), or correct the route to {there.address}"
    return [_of_path(path, "warning", value, need, fix)]


def _mtu(path: Path, to: WaitingEnd, sent: Sent) -> list[Finding]:
    ours, theirs = (to.link, sent.link) if path.reads else (sent.link, to.link)
    if ours is None or theirs is None or ours.mtu == theirs.mtu:
        return []
    value = f"{path}: MTU {ours.mtu} on {ours.name}, {theirs.mtu} on {theirs.name}"
    need = "one MTU on both ends: large packets are lost or cut otherwise"
    fix = f"ip link set dev {theirs.name} mtu {ours.mtu} on {path.target.node}, if the switches carry it"
    return [_of_path(path, "warning", value, need, fix)]


def _status(failure: EndFailure) -> Status:
    """Without memory of a device nothing was tried."""
    return "unknown" if failure.step == "device" else "failed"


def _cause_and_fix(end: End, failure: EndFailure) -> tuple[str, str]:
    if failure.step == "import":
        name, package = ("NIXL", "nixl") if end.engine == "nixl" else ("Mooncake", "mooncake")
        return (
            f"{name}, or a system library of it, is not there for the engines' interpreter",
            f"pip install the {package} package there; correct engine.python, or LD_LIBRARY_PATH in engine.env",
        )
    if failure.step == "device":
        return (
            "torch has no device there, the driver is not loaded, or another process has all its memory",
            "see the findings about devices; correct devices_per_node, or the image",
        )
    if failure.step == "initialize":
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
    if failure.step == "register":
        if failure.memlock is not None:
            return (
                f"RDMA locks what it registers, and {failure.memlock // 1024} KiB may be locked",
                "ulimit -l unlimited where pdserve starts (docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity "
                "for slurmd)",
            )
        if end.on_device:
            return _device_memory(end)
        return "the device refuses the memory", "read the engine's own lines below"
    if failure.step == "compare":
        return (
            "what arrived is not what was sent: defective memory, adapter or driver",
            f"leave a node out with exclude_nodes: [{end.node}] and try again; check the adapter's error counters",
        )
    if failure.step == "transfer" and end.on_device:
        return _device_memory(end)
    if failure.step == "start":
        return "the interpreter of the engines cannot run there", "correct engine.python; read the lines below"
    return (
        "the link drops or delays what is large (a cut link, a different MTU on the way), or is far too slow",
        f"compare MTU and error counters of both interfaces (ip -s link), or name another network ({_NETWORK})",
    )


def _device_memory(end: End) -> tuple[str, str]:
    """Of what an adapter or a library could not do with it."""
    if end.engine == "mooncake" and end.protocol == "tcp":
        return ONLY_ITS_RUNTIME, replacement(end.platform)
    module = "nvidia_peermem" if end.platform == "cuda" else "amdgpu with peer memory (or ib_peer_mem)"
    return (
        f"the adapter cannot reach device memory: neither {module} nor dmabuf, or a build of the transfer engine "
        "without support for the device",
        "see the findings about rdma; load the module on the host (modprobe), or use a kernel and a driver with dmabuf",
    )


def _what(path: Path) -> str:
    """What the transfer was."""
    does = "reads from" if path.reads else "writes to"
    memory = f"{_memory(path.source)} to {_memory(path.target)}"
    return f"{path.caller.connector} with {path.caller.protocol} {does} {path.waiting.address}, {memory}"


def _memory(end: End) -> str:
    return "device memory" if end.on_device else "host memory"


def _is_unverified(end: End) -> bool:
    return end.protocol == "rdma" or (end.on_device and end.platform == "rocm")


def _shown(link: Link | None) -> str:
    return "an unknown interface" if link is None else f"{link.name} (MTU {link.mtu})"


def _nominal(*links: Link | None) -> float | None:
    """What the slower end should give; None: it is not known of both."""
    known = [link.gbps for link in links if link is not None and link.gbps is not None]
    return min(known) if len(known) == len(links) else None


def _of_path(
    path: Path, status: Status, value: str, need: str, fix: str | None = None, evidence: Sequence[str] = ()
) -> Finding:
    unverified = _is_unverified(path.source) or _is_unverified(path.target)
    return _finding(path.caller.node, status, value, need, fix=fix, evidence=evidence, unverified=unverified)


def _finding(
    node: str,
    status: Status,
    value: str,
    need: str,
    *,
    fix: str | None,
    unverified: bool,
    evidence: Sequence[str] = (),
) -> Finding:
    if fix and status == "failed" and unverified:
        fix += (
            "; if the engines do move KV there, fabric.check: false leaves out this check, which never ran on RDMA "
            "or in device memory of ROCm"
        )
    return Finding(
        node=node,
        check="fabric",
        status=status,
        value=value,
        need=need,
        fix=fix,
        evidence=tuple(evidence),
        unverified_on_hardware=unverified,
    )
