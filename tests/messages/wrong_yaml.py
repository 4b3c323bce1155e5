"""Text that is not YAML, or not the YAML that was meant: colons, tabs, quotes, invisible characters, files."""

from __future__ import annotations

from tests.messages.kit import GOOD, Case, over, whole

SYNTAX = (
    over("a colon in a value", "description: Kimi: two nodes\n"),
    over(
        "a line indented below a value",
        "mode: disaggregated\n  patches: auto\n",
        fact="not YAML: this line is indented",
    ),
    over("no colon", "mode disaggregated\npatches: auto\n", fact="not YAML: no colon in this"),
    over("a tab behind a colon", "mode:\t@x\n", fact="a tab before the value"),
    over(
        "keys that do not line up",
        "decode:\n  instances: 1\n   parallel: {tp: 4}\n",
        fact="not YAML: this line is indented",
    ),
    whole("a first line that is indented", " schema: 1\nname: x\n", fact="not YAML: this line does not"),
    over("a list item among keys", "decode:\n  instances: 1\n- parallel\n", fact="not YAML: a list item (-)"),
    over(
        "a bracket that is not closed", "prefill:\n  devices: [0, 1, 2, 3\ndecode: {}\n", fact="not YAML: the [ of this"
    ),
    over(
        "a quote that is not closed",
        'description: "two nodes\nmode: disaggregated\n',
        fact="not YAML: the quote of this",
    ),
    over("text behind a quote", 'description: "two" nodes\n', fact="not YAML: text after the closing"),
    over("a value that begins with @", "description: @home\n"),
    over("a value that begins with >", "requires: \n  vllm: >=0.26\n"),
    over("an alias of nothing", "description: *bold\n"),
)
SURPRISES = (over("no in a list of texts", "exclude_nodes: [no, 7]\n"),)
INVISIBLE = (
    over(
        "a no-break space in the indentation",
        "decode:\n\u00a0\u00a0instances: 1\n",
        fact="\\u00a0\\u00a0instances: the key has U+00A0 (NO-BREAK",
    ),
    over("a no-break space behind a value", "mode: disaggregated\u00a0\n"),
    over("a zero-width space in a value", "mode: dis\u200baggregated\n"),
    over("a zero-width space in a key", "mo\u200bde: disaggregated\n", fact="mo\\u200bde: the key has U+200B (ZERO"),
    over("a no-break space in quotes", 'mode: "disaggregated\u00a0"\n'),
    whole("a NUL byte", b"schema: 1\nname: a\0b\n", fact="not YAML: U+0000 at column 8"),
    whole("an escape character", GOOD.replace("name: good", "name: \x1b[1mgood"), fact="not YAML: U+001B at column 7"),
    whole("UTF-16", ("\ufeff" + GOOD).encode("utf-16-le"), fact="the file is UTF-16, not UTF-8"),
    whole(
        "line ends of Windows and a typo",
        GOOD.replace("mode", "mode").replace("lmcache:", "lmcahe:").replace("\n", "\r\n"),
    ),
)
FILES = (
    whole("a base that extends this file", "extends: recipe.yaml\n", fact="extends runs in a circle: recipe.yaml"),
    whole(
        "a base named by a variable that is not set",
        "extends: ${BASE}\n",
        fact="extends: the environment variable BASE is",
    ),
)
KINDS: tuple[tuple[Case, ...], ...] = (SYNTAX, SURPRISES, INVISIBLE, FILES)
