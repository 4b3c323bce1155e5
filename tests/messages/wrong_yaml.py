"""Text that is not YAML, or not the YAML that was meant: colons, tabs, quotes, invisible characters, files."""

from __future__ import annotations

from tests.messages.kit import GOOD, Case, over, whole

SYNTAX = (
    over(
        "a colon in a value",
        "description: Kimi: two nodes\n",
        fact="not YAML: mapping values are not allowed here, at column 18",
    ),
    over(
        "a line indented below a value",
        "mode: disaggregated\n  patches: auto\n",
        fact="not YAML: mapping values are not allowed here, at column 10",
    ),
    over(
        "no colon",
        "mode disaggregated\npatches: auto\n",
        fact="not YAML: while scanning a simple key could not find expected ':",
    ),
    over(
        "a tab behind a colon", "mode:\t@x\n", fact="not YAML: while scanning for the next token found character '\\t'"
    ),
    over(
        "keys that do not line up",
        "decode:\n  instances: 1\n   parallel: {tp: 4}\n",
        fact="not YAML: mapping values are not allowed here, at column 12",
    ),
    whole(
        "a first line that is indented",
        " schema: 1\nname: x\n",
        fact="not YAML: expected '<document start>', but found '<block mapping",
    ),
    over(
        "a list item among keys",
        "decode:\n  instances: 1\n- parallel\n",
        fact="not YAML: while parsing a block mapping expected <block end>, bu",
    ),
    over(
        "a bracket that is not closed",
        "prefill:\n  devices: [0, 1, 2, 3\ndecode: {}\n",
        fact="not YAML: while parsing a flow sequence expected ',' or ']', but",
    ),
    over(
        "a quote that is not closed",
        'description: "two nodes\nmode: disaggregated\n',
        fact="not YAML: while scanning a quoted scalar found unexpected end of",
    ),
    over(
        "text behind a quote",
        'description: "two" nodes\n',
        fact="not YAML: while parsing a block mapping expected <block end>, bu",
    ),
    over(
        "a value that begins with @",
        "description: @home\n",
        fact="not YAML: while scanning for the next token found character '@'",
    ),
    over(
        "a value that begins with >",
        "requires: \n  vllm: >=0.26\n",
        fact="not YAML: while scanning a block scalar expected chomping or ind",
    ),
    over("an alias of nothing", "description: *bold\n", fact="not YAML: found undefined alias 'bold', at column 14"),
)
SURPRISES = (over("no in a list of texts", "exclude_nodes: [no, 7]\n"),)
INVISIBLE = (
    over(
        "a no-break space in the indentation",
        "decode:\n\u00a0\u00a0instances: 1\n",
        fact="\\u00a0\\u00a0instances: the key contains the invisible character",
    ),
    over(
        "a no-break space behind a value",
        "mode: disaggregated\u00a0\n",
        fact="mode: the value contains the invisible character U+00A0",
    ),
    over(
        "a zero-width space in a value",
        "mode: dis\u200baggregated\n",
        fact="mode: the value contains the invisible character U+200B",
    ),
    over(
        "a zero-width space in a key",
        "mo\u200bde: disaggregated\n",
        fact="mo\\u200bde: the key contains the invisible character U+200B",
    ),
    over("a no-break space in quotes", 'mode: "disaggregated\u00a0"\n'),
    whole("a NUL byte", b"schema: 1\nname: a\0b\n", fact="not YAML: found U+0000, a control character, at column 8"),
    whole(
        "an escape character",
        GOOD.replace("name: good", "name: \x1b[1mgood"),
        fact="not YAML: found U+001B, a control character, at column 7",
    ),
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
