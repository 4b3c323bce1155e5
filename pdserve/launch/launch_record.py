"""Writes down before anything starts: recipe, plan, versions, revision, host; and again, if it is deleted."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
from pathlib import Path

from pdserve import __version__
from pdserve.errors import StateError
from pdserve.launch.fleet import Fleet
from pdserve.plan.model import Plan, Versions
from pdserve.run.directory import RunDir, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system.process import output_of

_GIT_SECONDS = 5.0


def record_run(run: RunDir, plan: Plan, recipe_yaml: str, versions: Versions) -> None:
    """Saves the resolved recipe (secrets by name only), the plan and what it was made with."""
    run.write(run.recipe, recipe_yaml)
    run.write(run.plan, plan.model_dump_json(indent=2))
    record_versions(run, versions)


def record_versions(run: RunDir, versions: Versions) -> None:
    """Saves with what the engines run."""
    facts = {
        "pdserve": __version__,
        "git_revision": git_revision(Path(__file__).parent),
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "host": platform.node(),
        **versions.model_dump(),
    }
    run.write(run.versions, json.dumps(facts, indent=2))


def save_change(run: RunDir, plan: Plan, recipe_yaml: str | None) -> None:
    """Saves another plan of a deployment that runs, before anything is stopped for it. Raises StateError. The recipe
    stays (None) until all of it runs: the next plan is made around the ports that it names."""
    with record_errors(run):
        run.write(run.plan, plan.model_dump_json(indent=2))
        if recipe_yaml is not None:
            run.write(run.recipe, recipe_yaml)


class KeptRecord:
    """The record as the launcher keeps it: `status` and `down` must work after it was deleted."""

    def __init__(self, fleet: Fleet, *, engine_key: str | None = None) -> None:
        """Write the record of a launch. `engine_key` None: the file of the key is left alone."""
        self._fleet = fleet
        self._key = engine_key
        self._run = fleet.run
        self._texts: dict[Path, str] = {}
        self.keep()

    def keep(self) -> None:
        """Takes over what is written now."""
        files = (self._run.recipe, self._run.plan, self._run.versions)
        self._texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}

    def look(self) -> None:
        """Write the record anew if it is gone, and note that in the history. What cannot be written now is tried at the
        next look.

        A deletion may go on meanwhile, and take what had just been restored: everything by which `status`, `down` and
        `up` find the deployment is looked for. As long as the plan is there, the rest is written without an event.
        """
        with contextlib.suppress(OSError, StateError):
            if not self._run.plan.exists():
                self._restore(self._fleet.state)
                return
            for file, text in self._texts.items():
                if not file.exists():
                    self._run.write(file, text)
            if not self._run.state.exists():
                self._fleet.save()
            self._run.keep_current()
            self._keep_key()

    def _keep_key(self) -> None:
        """Write the key again where it is gone: a logout takes the folder of the key along, and the next login makes it
        anew. This is not done in a stop, which takes the key away."""
        if self._key is None or self._fleet.state.phase == "draining":
            return
        if self._run.read_key_folder() is None:
            self._run.note_key_folder()
        if not self._run.key_file.exists():
            self._run.save_key(self._key)

    def _restore(self, state: DeploymentState) -> None:
        RunDir.create(self._run.path.parent.parent, self._run.path.parent.name, self._run.run_id)
        state.note = (
            f"its record was deleted at {time.strftime('%H:%M:%S')} and is written anew; the history before is gone, "
            "and a process has a log again after pdserve restart NAME"
        )
        self._run.write(self._run.state, state.model_dump_json(indent=1))
        self._run.keep_current()
        if self._key is not None:
            self._run.note_key_folder()
        # The plan is the last one: as long as it is missing, the next look does all of this again.
        for file, text in sorted(self._texts.items(), key=lambda kept: kept[0] == self._run.plan):
            self._run.write(file, text)
        self._fleet.record("record_deleted", text=f"{state.name}: {state.note}")


def git_revision(folder: Path) -> str | None:
    """Return the commit that this code is, with `-dirty` if it was changed; None outside a checkout."""
    tool = output_of(["git", "describe", "--always", "--dirty", "--abbrev=12"], timeout=_GIT_SECONDS, cwd=folder)
    return tool.out.strip() if tool.code == 0 else None
