"""`pdserve up` on a deployment that runs: its launcher changes it while it serves."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import ReportedError, StateError
from pdserve.operations.look import Looked
from pdserve.operations.progress import VerbProgress
from pdserve.plan.nodes.reach import Srun
from pdserve.plan.time_limits import apply_seconds
from pdserve.run.directory import RunDir, lives
from pdserve.run.inbox import Apply, ask


def check_place(run: RunDir, nodes: Sequence[str], *, job: str | None) -> None:
    """StateError: the deployment of this name runs on other nodes. A second job of a recipe is a second deployment."""
    plan = run.read_plan()
    theirs = next((node.reach.job for node in plan.nodes if isinstance(node.reach, Srun)), None)
    there = [node.name for node in plan.nodes]
    if (theirs, sorted(there)) == (job, sorted(nodes)):
        return
    place = ", ".join(there) + (f" (job {theirs})" if theirs is not None else "")
    raise StateError(
        f"{plan.name} is running on {place}, and this is {', '.join(nodes)}" + (f" (job {job})" if job else ""),
        where=str(run.path),
        cause="a deployment is identified by its name, which the recipe gives",
        todo=f"another name for this one: --set name={plan.name}-2; or pdserve down {plan.name} first",
    )


def apply(run: RunDir, seen: Looked, show: VerbProgress, *, replace: bool) -> None:
    """Asks the launcher of `run`, and shows what it does. `replace`: also engines whose command has changed. Raises
    ReportedError with the launcher's own exit code when it refuses or fails."""
    planned = seen.planned
    launcher = run.read_state().launcher
    show.result(f"{planned.plan.name} is running (launcher PID {launcher.pid}); changing it while it serves")
    _, offset = run.read_events()

    def show_events() -> None:
        nonlocal offset
        events, offset = run.read_events(offset)
        for event in events:
            show.event(event)

    reply = ask(
        run,
        Apply(
            plan=planned.plan,
            recipe=planned.loaded.to_yaml(model_path=planned.plan.model_path),
            versions=planned.versions,
            replace=replace,
        ),
        seconds=apply_seconds(run.read_plan(), planned.plan),
        alive=lambda: lives(run, run.read_state()),
        look=show_events,
    )
    show_events()
    if reply.exit_code:
        raise ReportedError(reply.message, reply.exit_code)
    show.result(reply.message)
