"""Which commands of a script are run: what `&&` and `||` join, and the blocks around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdserve.importing.shell.values import negated

Kind = Literal["if", "case", "loop", "function", "{", "("]


@dataclass(frozen=True)
class CommandOutcome:
    """Of a command. `holds`: None where it is not known whether it succeeds; that depends on `names`. `expected`: it
    fails only where the launch as a whole does."""

    holds: bool | None
    names: frozenset[str] = frozenset()
    expected: bool = False


@dataclass
class JoinedCommands:
    """Commands that are joined, up to the one that is read."""

    runs: bool | None = True
    """Whether that one is run."""
    outcome: CommandOutcome = CommandOutcome(True)
    """Of those before it; in the end of all."""
    before: CommandOutcome = CommandOutcome(True)
    """Of those before the pipeline."""
    joined: str = ""

    def join(self, after: str) -> None:
        """The next command follows."""
        if after not in ("&&", "||"):  # a pipeline, whose outcome is that of its last command
            return
        self.before, self.joined = self.outcome, after
        if after == "||":
            self.runs = negated(self.before.holds)
        else:
            self.runs = True if self.before.expected else self.before.holds

    def end(self, outcome: CommandOutcome) -> None:
        """The command was read."""
        names = self.before.names | outcome.names
        if self.runs:
            self.outcome = outcome
        elif self.runs is False:
            self.outcome = self.before
        else:
            # Run or not, `unknown && false` fails and `unknown || true` succeeds.
            decided = outcome.holds is (self.joined == "||")
            self.outcome = CommandOutcome(outcome.holds if decided else None, names)


@dataclass
class Block:
    """An open `if`, `case`, loop, function or group. runs: None where that is not known."""

    kind: Kind
    line: int
    around: RunCondition
    """Whether it is reached."""
    outer: JoinedCommands
    runs: bool | None = True
    taken: bool | None = False
    """Of an `if`: whether a branch before this one was run."""
    names: frozenset[str] = frozenset()
    awaits_pattern: bool = False
    """Of a `case`."""
    negates: bool = False
    """A `!` stands before it."""
    function: str | None = None
    awaits_body: bool = False
    """Of a function: its `{` comes next."""

    def decide(self, outcome: CommandOutcome) -> None:
        """`then`: the outcome of the commands since `if` or `elif`."""
        if outcome.holds is None:
            self.names |= outcome.names
        self.runs = None if self.taken is None else False if self.taken else outcome.holds
        self.taken = outcome.holds if self.taken is False else self.taken

    def turn(self) -> None:
        """`else`, or the test of an `elif`."""
        self.runs = negated(self.taken)


@dataclass(frozen=True)
class RunCondition:
    """Whether something is run, and what that depends on where it is not known."""

    runs: bool | None = True
    names: frozenset[str] = frozenset()
    others: frozenset[str] = field(default=frozenset())
    """What it depends on beside variables: the `case` at line 3."""

    def also(self, runs: bool | None, names: frozenset[str], other: str) -> RunCondition:
        """And this. `other`: where no variable decides it."""
        if runs is True or self.runs is False:
            return self
        if runs is False:
            return RunCondition(False)
        # The same set where there is no other: an `if` may depend on thousands, and each command in it has them.
        return RunCondition(
            None, self.names | names if self.names else names, self.others if names else self.others | {other}
        )
