"""Instances onto nodes: roles in start order, each instance on the first node that still has room for it. Beside a
deployment that runs, its instances keep their places, and new ones take what is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.node import Node
from pdserve.plan.process import Process
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.plan.slurm_nodes import submit_line
from pdserve.recipe.model import Parallel, Recipe, Role
from pdserve.roles import EngineRole


@dataclass(frozen=True)
class Share:
    """The part of an instance that one process has: devices of one node."""

    node: Node
    devices: tuple[int, ...]
    workers: int


@dataclass(frozen=True)
class Instance:
    """Describes one engine instance. The first share is the leader's: the other processes meet there.

    The processes have ranks in the order of their shares. With external load balancing that is the data-parallel rank,
    else the rank of the node.
    """

    role_name: EngineRole
    index: int
    role: Role
    shares: tuple[Share, ...]

    @property
    def name(self) -> str:
        """Return the leader's process name."""
        return f"{self.role_name}-{self.index}"

    @property
    def leader(self) -> Share:
        return self.shares[0]

    @property
    def balances_itself(self) -> bool:
        """Tell whether one API server has all ranks behind it, on whatever node."""
        return self.role.parallel.load_balancing == "internal"

    def process_name(self, rank: int) -> str:
        """Return the name of the process of that rank."""
        if rank == 0:
            return self.name
        return f"{self.name}-{'rank' if self.role.parallel.load_balancing == 'external' else 'node'}{rank}"

    def has_server(self, rank: int) -> bool:
        """Return whether the process of that rank has an API server. The others are its followers."""
        return rank == 0 or not self.balances_itself

    def server_of(self, rank: int) -> str:
        """Return the name of the process whose API server the engines of that process belong to."""
        return self.process_name(rank) if self.has_server(rank) else self.name

    def dp_ranks(self, rank: int) -> range:
        """Return the data-parallel ranks whose ports are those of that process: with one API server for all, every
        rank."""
        each = self.role.parallel.ranks_of_server
        first = 0 if self.balances_itself else rank * each
        return range(first, first + each)


def split_by_process(parallel: Parallel, shares: Sequence[Share]) -> tuple[Share, ...]:
    """Divide what an instance has on each node among its processes there."""
    each = parallel.processes // parallel.nodes
    return tuple(
        Share(
            share.node,
            share.devices[i * len(share.devices) // each : (i + 1) * len(share.devices) // each],
            share.workers // each,
        )
        for share in shares
        for i in range(each)
    )


def devices_on_one_node(parallel: Parallel) -> int:
    """Return the devices that an instance needs on each of its nodes."""
    return -(-parallel.workers // parallel.nodes)


def instance_too_large(recipe: Recipe, name: EngineRole, role: Role, size: int) -> RecipeError:
    """Return the error for one instance that alone is larger than its nodes, which have `size` devices."""
    parallel = role.parallel
    shared = recipe.lmcache is not None and name in recipe.lmcache.on  # its server serves one node only
    spread = "" if shared else f", or spread it: `nodes: {-(-parallel.workers // size)}`"
    line = f"write `tp: {size * parallel.nodes}`" if parallel.workers == parallel.tp else "lower tp, pp or dp"
    return RecipeError(
        f"an instance of {name} needs {devices_on_one_node(parallel)} devices of one node, and a node has {size}",
        where=f"{name}.parallel",
        cause=f"{parallel.product()}, over {parallel.nodes} "
        f"{'node' if parallel.nodes == 1 else 'nodes'}, and devices_per_node is {size}",
        todo=f"{line}{spread}; or correct devices_per_node",
    )


def too_many_instances(needed: str, name: EngineRole, role: Role, most: int, nodes: str) -> RecipeError:
    """Return the error for instances each of which fits, and whose number does not. `needed`: the sum of devices;
    `most`: instances that fit."""
    return RecipeError(
        f"{needed}, and a deployment has at most {nodes}",
        where=f"{name}.instances",
        cause=f"{role.instances} instances of {name} are too many",
        todo=f"write `instances: {most}`, or less; or start several deployments",
    )


def too_few_nodes(name: str, wanted: int, here: int, recipe: Recipe, recipe_file: str) -> PreflightError:
    """Return the error for a CPU, where there are no devices to count: nodes are missing."""
    line = submit_line(nodes=wanted, gpus_per_node=0, exclude=recipe.exclude_nodes, words=[recipe_file])
    return PreflightError(
        f"{name} spans {wanted} nodes, and there {'is 1' if here == 1 else f'are {here}'} here",
        todo=f"use {wanted} nodes: {line}, or pdserve up {recipe_file} --cluster FILE",
    )


SINGLE_NODE = Node(name="localhost")
_MOST_NODES = 254
_MOST_DEVICES = 1 << 16
"""Far beyond every cluster of so many nodes; more are not counted one by one."""


def place(
    recipe: Recipe, nodes: Sequence[Node], *, running: RunningProcesses = NOTHING, recipe_file: str = "RECIPE"
) -> tuple[Instance, ...]:
    """Gives every instance its devices. An instance of `running` keeps its own, unless the recipe gives it another
    number of devices, nodes or processes, or names others. `recipe_file` is only quoted in advice.

    Raises RecipeError for what fits nowhere, PreflightError with the sum and what to type for what does not fit here.
    On a CPU there are no devices to count: instances go to the nodes in turn.
    """
    _check(recipe)
    placed = _try(recipe, nodes, running)
    if isinstance(placed, _NoRoom):
        raise _does_not_fit(recipe, nodes, running, placed, recipe_file)
    return placed


def has_room(recipe: Recipe, nodes: Sequence[Node]) -> bool:
    """Return whether `place` finds room on these nodes. Raises RecipeError for what fits nowhere."""
    _check(recipe)
    return not isinstance(_try(recipe, nodes), _NoRoom)


def nodes_for(recipe: Recipe) -> tuple[Node, ...]:
    """Return as many hypothetical nodes of `devices_per_node` as the recipe needs, to plan without the real ones.

    Their addresses are those that RFC 5737 keeps for documentation. Without `devices_per_node` it is one node that
    has just enough.
    """
    _check(recipe)
    if recipe.platform == "cpu":
        return _hypothetical(max(role.parallel.nodes for _, role in recipe.roles()), 0)
    size = recipe.devices_per_node or devices_needed(recipe)
    for count in range(-(-devices_needed(recipe) // max(size, 1)) or 1, _MOST_NODES + 1):
        nodes = _hypothetical(count, size)
        if not isinstance(_try(recipe, nodes), _NoRoom):
            return nodes
    if all(role.devices is None for _, role in recipe.roles()):
        for name, role in recipe.roles():
            if devices_on_one_node(role.parallel) > size:
                raise instance_too_large(recipe, name, role, size)
        name, role = max(recipe.roles(), key=lambda item: item[1].instances * item[1].parallel.workers)
        most = _most_that_fit(recipe, name, role, size)
        raise too_many_instances(device_sum(recipe), name, role, most, f"{_MOST_NODES} nodes of {size} devices")
    raise RecipeError(
        f"no number of nodes with {size} devices each can run this: {device_sum(recipe)}",
        where="devices_per_node",
        cause="one instance wants more devices, or other device ids, than such a node has",
        todo="let an instance span nodes (<role>.parallel.nodes), lower its parallelism, or correct devices_per_node",
    )


def _most_that_fit(recipe: Recipe, name: EngineRole, role: Role, size: int) -> int:
    """Return how many instances of the role the largest deployment holds, beside those of the other roles."""
    each = role.parallel.workers
    most = max((_MOST_NODES * size - devices_needed(recipe) + role.instances * each) // each, 1)
    while most > 1 and not has_room(
        recipe.model_copy(update={name: role.model_copy(update={"instances": most})}), _hypothetical(_MOST_NODES, size)
    ):
        most -= 1
    return most


@dataclass(frozen=True)
class _NoRoom:
    """The first instance that fits nowhere, and the most that any node had left for it."""

    name: str
    needs: int
    nodes: int
    left: int
    ids: tuple[int, ...] | None


def _hypothetical(count: int, size: int) -> tuple[Node, ...]:
    devices = tuple(range(size))
    if count == 1:
        return (Node(name=SINGLE_NODE.name, devices=devices),)
    return tuple(Node(name=f"node{i}", address=f"198.51.100.{i + 1}", devices=devices) for i in range(count))


def _check(recipe: Recipe) -> None:
    if recipe.devices_per_node > _MOST_DEVICES:
        raise _too_many(recipe.devices_per_node, "devices_per_node")
    for name, role in recipe.roles():
        if (devices := role.instances * role.parallel.workers) > _MOST_DEVICES:
            raise _too_many(devices, f"{name}.instances" if role.instances > 1 else f"{name}.parallel")
        size, spans = role.parallel.workers, role.parallel.nodes
        if size % spans:
            raise RecipeError(
                f"{size} workers ({role.parallel.product()}) cannot be spread evenly over {spans} nodes",
                where=f"{name}.parallel.nodes",
            )
        if role.devices is None:
            continue
        if recipe.platform == "cpu":
            raise RecipeError("there are no devices to choose on the CPU platform", where=f"{name}.devices")
        if len(role.devices) != role.instances * size:
            raise RecipeError(
                f"{len(role.devices)} device ids for {role.instances} instance(s) of {size} devices",
                where=f"{name}.devices",
                todo=f"list {role.instances * size} ids, {size} for each instance in turn; or leave it out",
            )


def _too_many(devices: int, where: str) -> RecipeError:
    return RecipeError(
        f"{devices if devices < 10**12 else 'more than 10^12'} devices are more than a plan is made for",
        where=where,
        cause="a slip of the keyboard: instances * tp * pp * pcp * dp are the devices of a role",
        todo=f"write numbers that make {_MOST_DEVICES} devices or fewer",
    )


def _try(recipe: Recipe, nodes: Sequence[Node], running: RunningProcesses = NOTHING) -> tuple[Instance, ...] | _NoRoom:
    """Place new instances apart from those that go; where that finds no room, on their devices."""
    placed = _place_all(recipe, nodes, running, apart=bool(running))
    if running and isinstance(placed, _NoRoom):
        return _place_all(recipe, nodes, running, apart=False)
    return placed


def _place_all(
    recipe: Recipe, nodes: Sequence[Node], running: RunningProcesses, *, apart: bool
) -> tuple[Instance, ...] | _NoRoom:
    """Place every instance, or tell which one has no room. `apart`: an instance takes nothing that another one has
    until it goes, as long as there are other devices: it can then be started before."""
    free = {node.name: list(node.devices) for node in nodes}
    hosted: Counter[str] = Counter()  # instances on each node
    wanted = [(name, index, role) for name, role in recipe.roles() for index in range(role.instances)]
    places: dict[tuple[EngineRole, int], tuple[Share, ...]] = {}
    for name, index, role in wanted if running else ():
        shares = _same_places(recipe, running.instance(f"{name}-{index}"), role, _named_devices(role, index), nodes)
        if shares and all(set(share.devices) <= set(free[share.node.name]) for share in shares):
            places[name, index] = shares
            _occupy(free, hosted, shares)
    held = _devices_to_be_freed(running, [f"{name}-{index}" for name, index in places]) if apart else {}
    for name, index, role in wanted:
        if (name, index) in places:
            continue
        size, spans, ids = role.parallel.workers, role.parallel.nodes, _named_devices(role, index)
        if recipe.platform == "cpu":
            shares = _least_used(nodes, hosted, size // spans, spans)
        else:
            idle = _devices_for(free, held, f"{name}-{index}") if held else free
            shares = _first_with_room(nodes, idle, size // spans, spans, ids)
            shares = shares or _first_with_room(nodes, free, size // spans, spans, ids)
        if len(shares) < spans:
            left = max((len(devices) for devices in free.values()), default=0)
            return _NoRoom(f"{name}-{index}", size // spans, spans, left, ids)
        _occupy(free, hosted, shares)
        places[name, index] = split_by_process(role.parallel, shares)
    return tuple(Instance(name, index, role, places[name, index]) for name, index, role in wanted)


def _named_devices(role: Role, index: int) -> tuple[int, ...] | None:
    """Return the devices that the recipe names for an instance; None: it names none."""
    size = role.parallel.workers
    return tuple(role.devices[index * size : (index + 1) * size]) if role.devices else None


def _same_places(
    recipe: Recipe, processes: Sequence[Process], role: Role, ids: tuple[int, ...] | None, nodes: Sequence[Node]
) -> tuple[Share, ...]:
    """Return the shares of an instance that runs as these processes; (): it is to be of another shape, or elsewhere."""
    parallel, there = role.parallel, {node.name: node for node in nodes}
    each = parallel.workers // parallel.processes
    ranks, used = [process.ranks for process in processes], [process.node for process in processes]
    same_shape = (
        len(processes) == parallel.processes
        and len(set(used)) == parallel.nodes
        and all(rank is not None and rank.workers == each for rank in ranks)
        and all(len(process.devices) == (0 if recipe.platform == "cpu" else each) for process in processes)
    )
    as_named = ids in (None, tuple(device for process in processes for device in process.devices))
    if not same_shape or not as_named or not set(used) <= there.keys():
        return ()
    return tuple(Share(there[process.node], process.devices, each) for process in processes)


def _devices_to_be_freed(running: RunningProcesses, kept: Collection[str]) -> dict[tuple[str, int], str]:
    """Return which instance has a device of a node until that instance goes, or is placed anew."""
    return {
        (process.node, device): process.instance
        for process in running.engines
        if process.instance is not None and process.instance not in kept
        for device in process.devices
    }


def _devices_for(free: Mapping[str, list[int]], held: Mapping[tuple[str, int], str], name: str) -> dict[str, list[int]]:
    """Return `free` without what others than the instance of that name hold."""
    return {node: [device for device in left if held.get((node, device), name) == name] for node, left in free.items()}


def _occupy(free: dict[str, list[int]], hosted: Counter[str], shares: Sequence[Share]) -> None:
    for share in shares:
        free[share.node.name] = [device for device in free[share.node.name] if device not in share.devices]
    hosted.update({share.node.name for share in shares})


def _least_used(nodes: Sequence[Node], hosted: Mapping[str, int], each: int, spans: int) -> tuple[Share, ...]:
    """Return, on a CPU, the nodes that host the fewest instances, in turn where it is the same; none twice, or
    nothing."""
    if len(nodes) < spans:
        return ()
    return tuple(Share(node, (), each) for node in sorted(nodes, key=lambda node: hosted[node.name])[:spans])


def _first_with_room(
    nodes: Sequence[Node], free: Mapping[str, list[int]], each: int, spans: int, ids: tuple[int, ...] | None
) -> tuple[Share, ...]:
    """Return `each` devices (or exactly `ids`, in slices) of the first `spans` nodes that have them, or nothing."""
    shares: list[Share] = []
    for node in nodes:
        if len(shares) == spans:
            break
        left = free[node.name]
        wanted = left[:each] if ids is None else list(ids[len(shares) * each : (len(shares) + 1) * each])
        if len(wanted) == each and len(set(wanted)) == each and set(wanted) <= set(left):
            shares.append(Share(node, tuple(wanted), each))
    return tuple(shares) if len(shares) == spans else ()


def devices_needed(recipe: Recipe) -> int:
    """Return the devices of all instances together."""
    return sum(role.instances * role.parallel.workers for _, role in recipe.roles())


def device_sum(recipe: Recipe) -> str:
    """Return the sum of devices: `prefill 1 x 8 + decode 1 x 8 = 16 devices`."""
    terms = [f"{name} {role.instances} x {role.parallel.workers}" for name, role in recipe.roles()]
    return f"{' + '.join(terms)} = {devices_needed(recipe)} devices"


def _does_not_fit(
    recipe: Recipe, nodes: Sequence[Node], running: RunningProcesses, no_room: _NoRoom, recipe_file: str
) -> PreflightError:
    if recipe.platform == "cpu":
        return too_few_nodes(no_room.name, no_room.nodes, len(nodes), recipe, recipe_file)
    total = sum(len(node.devices) for node in nodes)
    if len(nodes) == 1:
        devices = nodes[0].devices
        here = f"this host has {total}" + (f" ({_ids(devices)})" if devices else "")
    else:
        here = f"these {len(nodes)} nodes have {total} ({', '.join(f'{n.name}: {len(n.devices)}' for n in nodes)})"
    cause = None
    if total >= devices_needed(recipe):
        place = "one node" if no_room.nodes == 1 else f"each of {no_room.nodes} nodes"
        cause = f"{no_room.name} needs {no_room.needs} devices on {place}, at most {no_room.left} are left on any"
        if no_room.ids is not None:
            cause = f"{no_room.name} asks for devices {_ids(no_room.ids)}, which no node has left"
    todo = _advice(recipe, nodes, recipe_file)
    if running and not isinstance(_try(recipe, nodes), _NoRoom):
        cause = f"{cause}: instances that run keep their devices"
        todo = f"pdserve down {recipe.name}, then pdserve up {recipe_file}: a new start has room for all"
    return PreflightError(f"{device_sum(recipe)}; {here}", cause=cause, todo=todo)


def _advice(recipe: Recipe, nodes: Sequence[Node], recipe_file: str) -> str:
    largest = max((len(node.devices) for node in nodes), default=0)
    if not largest:
        return f"run it on a host with {recipe.platform} devices; recipes/tiny-cpu.yaml needs none"
    advice = []
    if smaller := _halved_until_it_fits(recipe, nodes):
        advice.append(f"to run it here: pdserve up {recipe_file} {smaller}")
    if more := _enough_nodes(recipe, largest):
        line = submit_line(nodes=more, gpus_per_node=largest, exclude=recipe.exclude_nodes, words=[recipe_file])
        advice.append(
            f"as it is, it needs {more} nodes like this one: {line}, or pdserve up {recipe_file} --cluster FILE"
        )
    return "; ".join(advice) or "lower instances or parallelism, or use nodes with more devices"


def _halved_until_it_fits(recipe: Recipe, nodes: Sequence[Node]) -> str | None:
    """Return the overrides that make the recipe fit by halving tensor parallelism, if that is possible at all."""
    if any(role.devices is not None for _, role in recipe.roles()):
        return None
    smaller = recipe
    while (widest := max(role.parallel.tp for _, role in smaller.roles())) % 2 == 0:
        roles: dict[str, Role] = {
            name: _with_tp(role, widest // 2) for name, role in smaller.roles() if role.parallel.tp == widest
        }
        smaller = smaller.model_copy(update=roles)
        if any(role.parallel.workers % role.parallel.nodes for role in roles.values()):
            return None
        if not isinstance(_try(smaller, nodes), _NoRoom):
            before = dict(recipe.roles())
            return " ".join(
                f"--set {name}.parallel.tp={role.parallel.tp}"
                for name, role in smaller.roles()
                if role.parallel.tp != before[name].parallel.tp
            )
    return None


def _with_tp(role: Role, tp: int) -> Role:
    return role.model_copy(update={"parallel": role.parallel.model_copy(update={"tp": tp})})


def _enough_nodes(recipe: Recipe, size: int) -> int | None:
    for count in range(1, min(devices_needed(recipe), _MOST_NODES) + 1):
        if not isinstance(_try(recipe, _hypothetical(count, size)), _NoRoom):
            return count
    return None


def _ids(devices: Sequence[int]) -> str:
    """Return ids as ranges: 0-3,6 for 0,1,2,3,6."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
