"""Names in the pages are names in the code: files, links, exit codes, variables, keys of a recipe, rooms."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from pdserve import errors
from pdserve.cli.look import CAUSE_SEEN
from pdserve.logs.known_causes import RULES
from tests.docs.markdown import (
    EXIT_CODES,
    PAGES,
    PROOFS,
    README,
    REPOSITORY,
    TROUBLESHOOTING,
    Page,
)
from tests.tables import each_row

ALL = [*map(Page, PAGES)]
FOLDERS = ("pdserve", "tests", "docs", "scripts", "recipes", "slurm", "schema", "requirements")


MESSAGES = "what the log or the error has"


@each_row("page", ALL)
def test_links_are_alive(page: Page) -> None:
    for link in page.links():
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in Page(path).anchors(), f"{page.name} links to {link}"


@each_row("page", ALL)
def test_paths_in_backticks_exist(page: Page) -> None:
    for text in page.inline():
        for word in text.split():
            folder, slash, _ = word.removeprefix("./").partition("/")
            if slash and folder in FOLDERS:
                assert [*REPOSITORY.glob(word.replace("NAME", "*"))], f"{page.name} names {word}"


def test_exit_codes_are_those_of_the_error_tree() -> None:
    rows = EXIT_CODES.table("code")
    documented = {name: int(row[0]) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    raised = {error.__name__: error.exit_code for error in _subclasses(errors.PdserveError)}
    del raised["ReportedError"]  # shown again with the code that it had at first
    assert documented == raised
    by_signal = {128 + signum for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    assert {int(row[0]) for row in rows} == {0, errors.PdserveError.exit_code, CAUSE_SEEN, *by_signal, *raised.values()}


def _subclasses(error: type[errors.PdserveError]) -> Iterator[type[errors.PdserveError]]:
    """Without what a module raises and catches by itself."""
    for inner in error.__subclasses__():
        if inner.__module__ == errors.__name__:
            yield inner
        yield from _subclasses(inner)


def test_every_proof_that_is_shown_is_explained() -> None:
    explained = [row[0].strip("`") for row in PROOFS.table("proof")]
    assert proofs_shown(PROOFS) == explained
    assert proofs_shown(README)
    assert set(proofs_shown(README)) <= set(explained)


def proofs_shown(page: Page) -> list[str]:
    return re.findall(r"^(?:proven|failed|not-proven) +(\w+):", page.text, re.MULTILINE)


@each_row("page", ALL)
def test_nothing_of_the_machine_that_it_was_written_on(page: Page) -> None:
    paths = re.findall(r"(?:/home/|/root/|/work/|/tmp/(?!pdserve-UID))\S*", page.text)
    assert not paths


def test_every_message_in_troubleshooting_is_one_that_up_explains() -> None:
    """As the rules of the known causes have it, without the signs of a regular expression."""
    known = [re.sub(r"[\\()?:|]", " ", rule.pattern.pattern) for rule in RULES]
    messages = [text for row in TROUBLESHOOTING.table(MESSAGES) for text in re.findall(r"`([^`]+)`", row[0])]
    assert len(messages) > 10
    for message in messages:
        for piece in message.split("..."):
            words = re.sub(r"[\\()?:|]", " ", piece).split()
            assert any(all(word in rule for word in words) for rule in known), message
