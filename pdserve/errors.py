"""Everything that pdserve raises on purpose.

    PdserveError                        exit
    ├── RecipeError                      2    the recipe cannot mean anything runnable
    ├── PreflightError                   3    the recipe is fine, this machine cannot run it
    ├── StartError                       4    a process failed, or was late, before the deployment was ready
    ├── ServeError                       5    a process died while the deployment was serving
    ├── VerifyError                      6    a proof failed: the deployment runs but does not do what it should
    │   └── NotProvenError               7    nothing is wrong, but a proof could not be carried out here
    ├── InvalidBenchError                9    a benchmark was made, and its figures do not count
    ├── SourceDifferenceError           11    a recipe has less, or other, than the file that it comes from
    ├── InvalidSweepError               12    a sweep was made, and some of its points do not count
    ├── CommandError                   126    the command of `pdserve run` cannot be executed; 127: there is none
    ├── ReportedError                    *    an error of a detached launcher, shown again by the command that waits
    ├── StateError                       8    there is no such deployment or process, or it is already running
    ├── NotOursError                     8    there is one, and another user may have written it: it is not obeyed
    └── AgentProtocolError               4    an agent sent a line that the launcher cannot read

Each says what failed, where, the likely cause and what to do next. Exit code 1 is left to bugs
(a traceback), 10 to `pdserve doctor` where it sees a cause, 130 to Ctrl-C.
"""

from __future__ import annotations

from pdserve.printable import printable

NOT_OURS = "it belongs to another user, or is no file"
MAKE_ROOM = "make room there (pdserve list --prune removes old runs), or set PDSERVE_HOME to a folder on another disk"
AS_ITS_USER = "run pdserve as the user who has started the deployment"
"""Causes and fixes of a file of a deployment that cannot be opened or written."""


class PdserveError(Exception):
    """Is the base of pdserve's errors. `where` is a file:line, a process@node or a URL; `cause` and `todo` are whole
    sentences."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        cause: str | None = None,
        todo: str | None = None,
        evidence: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.cause = cause
        self.todo = todo
        self.evidence = evidence

    def render(self) -> str:
        """Return the text that a user sees: one fact a line, evidence (log lines) last; nothing in it moves a
        terminal."""
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.cause:
            lines.append(f"  likely cause: {self.cause}")
        if self.todo:
            lines.append(f"  what to do:   {self.todo}")
        lines.extend(f"  | {line}" for line in self.evidence)
        return printable("\n".join(lines))


class RecipeError(PdserveError):
    """The recipe is wrong: unknown key, wrong type, impossible combination. Raised before anything starts."""

    exit_code = 2


class PreflightError(PdserveError):
    """The machine cannot run the recipe: devices, memory, ports, missing packages or model files."""

    exit_code = 3


class StartError(PdserveError):
    """A process died, never became ready or failed its canary while the deployment was starting."""

    exit_code = 4


class AgentProtocolError(StartError):
    """An agent's line is not a message of the protocol: another version, or something prints to its stdout."""


class ServeError(PdserveError):
    """A process died while the deployment was serving and it cannot serve on."""

    exit_code = 5


class VerifyError(PdserveError):
    """A proof of `pdserve verify` failed."""

    exit_code = 6


class NotProvenError(VerifyError):
    """No proof failed, but at least one could not be carried out on this deployment."""

    exit_code = 7


class ReportedError(PdserveError):
    """An error that another process of ours has rendered already: shown as it is, with its own exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def render(self) -> str:
        return self.what


class SourceDifferenceError(PdserveError):
    """A recipe is valid, and what it serves is not what the file of another tool describes."""

    exit_code = 11


class InvalidBenchError(PdserveError):
    """A measurement of `pdserve bench` is INVALID: the evidence has a line for each reason."""

    exit_code = 9


class InvalidSweepError(PdserveError):
    """Points of `pdserve sweep` are INVALID: the evidence has a line for each reason."""

    exit_code = 12


class CommandError(PdserveError):
    """The command of `pdserve run` cannot be executed. The exit code is the one of every shell: 127 where there is no
    such program, otherwise 126."""

    exit_code = 126

    def __init__(self, what: str, exit_code: int, *, cause: str, todo: str) -> None:
        super().__init__(what, cause=cause, todo=todo)
        self.exit_code = exit_code


class StateError(PdserveError):
    """The deployment or process named on the command line is unknown, already up, or already down."""

    exit_code = 8


class NotOursError(PdserveError):
    """The record of a deployment belongs to another user, or others can write it. No StateError: who takes a deployment
    that is not recorded for one that does not run must not do so here."""

    exit_code = 8
