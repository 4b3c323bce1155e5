"""Shell scripts with `vllm serve`: simple ones are read as a shell would, and never run; what is more is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.formats import import_launch
from pdserve.importing.launch import Draft, ImportChoice
from pdserve.importing.shell_words import commands
from pdserve.operations.import_recipe import import_file
from tests.importing.kit import notes
from tests.messages.kit import run
from tests.tables import each_row

SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
export VLLM_LOGGING_LEVEL=INFO   # a comment
EXTRA="--max-num-seqs 64" SEED=${SEED:-${FIRST:-3}}
UCX_TLS=rc vllm serve "$MODEL" --host 0.0.0.0 --port $PORT \\
    -tp "${TP}" \\
    $EXTRA --seed $SEED \\
    --compilation-config '{"cudagraph_mode":"PIECEWISE"}' \\
    --speculative-config "{\\"method\\": \\"mtp\\", \\"num_speculative_tokens\\": $SPEC}" \\
    --attention_config.use_fp4_indexer_cache True \\
    --no-enable-prefix-caching > server.log 2>&1 &
echo "vllm serve is up" | cat
cat <<EOF
vllm serve never
EOF
until curl -s localhost:8000/health; do sleep 1; done
"""
GIVEN = {"TP": "8", "MODEL": "org/model", "SPEC": "2"}


def read(text: str, **variables: str) -> Draft:
    return import_launch(text, "serve_b200.sh", ImportChoice(variables={**GIVEN, **variables}))


def args(text: str, **variables: str) -> dict[str, object]:
    found: dict[str, object] = read(text, **variables).document["aggregated"].get("args", {})
    return found


def refused(text: str, **variables: str) -> str:
    with pytest.raises(RecipeError) as caught:
        import_launch(text, "serve.sh", ImportChoice(variables=variables))
    return f"{caught.value.where} {caught.value.what} {caught.value.todo}"


def test_the_command_line_is_what_the_shell_would_make_of_it() -> None:
    draft = read(SCRIPT)
    assert draft.document["model"] == {"id": "org/model", "served_name": "org/model"}
    assert draft.document["aggregated"]["parallel"] == {"tp": 8}
    assert draft.document["aggregated"]["args"] == {
        "max-num-seqs": 64,
        "seed": 3,
        "compilation-config": {"cudagraph_mode": "PIECEWISE"},
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 2},
        "attention-config": {"use_fp4_indexer_cache": "True"},
        "enable-prefix-caching": False,
    }
    assert draft.document["aggregated"]["env"] == {"VLLM_LOGGING_LEVEL": "INFO", "UCX_TLS": "rc"}
    assert draft.losses() == []
    assert "`until`" in notes(draft, "confirm"), "what is not read behind the server is named"


def test_each_value_has_the_line_of_its_word() -> None:
    origins = read(SCRIPT).origins
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "--compilation-config" in text)
    assert origins["aggregated", "args", "compilation-config"] == f"{line}: --compilation-config"


def test_variables_that_the_caller_must_give_are_asked_for_all_at_once() -> None:
    text = refused(SCRIPT)
    assert "serve.sh:5 the script gives no value of MODEL, TP, SPEC give: --var MODEL=" in text
    assert "PORT" not in text, "pdserve sets the port"


@each_row(
    "value", ["$(nvidia-smi -L | wc -l)", "`cat n`", "$((2 * 4))", "${X%b}", "(4 5)", "$1", "$X", "~/n", "${HOME:-8}"]
)
@each_row("by", ["", "export "])
def test_a_value_that_is_not_read_is_asked_for_where_it_counts(by: str, value: str) -> None:
    text = f"{by}N={value}\n" + 'vllm serve m -tp "$N"\n'
    assert "serve.sh:2 the script gives no value of N give: --var N=..." in refused(text)
    assert read(text, N="4").document["aggregated"]["parallel"] == {"tp": 4}


@each_row("sets", ["[ -n '' ] && N=1", "nvidia-smi || N=1", "N=1 &", "echo 1 | N=1", ": ${N:=4}", "unset N"])
def test_a_value_that_a_command_may_change_is_asked_for(sets: str) -> None:
    assert "--var N=..." in refused(f"N=2\n{sets}\nvllm serve m -tp $N\n")


@each_row("before, line, what", [
    ("if true; then", 1, "`if` stands before"),
    ("A=1\nfor X in 1 2; do", 2, "`for` stands before"),
    ("f() {", 1, "a group or a function stands before"),
    ("read -r TP < file\n", 1, "`read` stands before"),
    ("printf -v TP 4\n", 1, "`printf` stands before"),
    ("set -a\n", 1, "`set` stands before"),
    ("declare -i TP=4\n", 1, "`declare` stands before"),
    ("IFS=,\n", 1, "stands before"),
    ("A[0]=2\n", 1, "stands before"),
    ("export $(cat .env)\n", 1, "`export` has names that are known only when it runs"),
    ("[ -n x ] &&", 1, "only if a command before it succeeds"),
    ("bash -c 'vllm serve m'\n", 1, "a server in the text of a command"),
    ("ssh node <<E\nvllm serve m\nE\n", 1, "a server in the text of a command"),
    ("A=1\nCMD=(vllm serve m)\n", 2, "a server in an array"),
    ("PID=$(vllm serve m & echo $!)\n", 1, "a server in an array, or in a command of its own"),
])  # fmt: skip
def test_what_is_not_read_before_a_server_is_refused_with_its_line_and_the_way_out(
    before: str, line: int, what: str
) -> None:
    message = refused(f"{before} vllm serve m\n")
    assert message.startswith(f"serve.sh:{line} ")
    assert what in message
    assert message.endswith("in a copy of the script, and import that")


@each_row(
    "text", ["echo vllm serve m\n", "vllm serve\n", "exit 0\nvllm serve m\n", "exec x\nvllm serve m\n", "A='vllm serve"]
)
def test_a_script_without_a_server_is_refused(text: str) -> None:
    assert refused(text)


def test_the_caller_gives_the_words_of_an_array_as_one_text() -> None:
    text = 'ARGS=(--seed 3)\nCMD=(vllm serve m)\n"${CMD[@]}" "${ARGS[@]}"\n'
    assert args(text, CMD="vllm serve m", ARGS="--seed 4 --dtype 'a b'") == {"seed": 4, "dtype": "a b"}
    assert "give: --var CMD=..." in refused('"${CMD[@]}" m\necho vllm serve')
    draft = read("vllm serve m\n$OTHER x\n")
    assert ["may start a server too" in note.why for note in draft.losses()] == [True]


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    read(f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\nvllm serve m\n")
    assert not mark.exists()


def test_quotes_decide_what_a_dollar_a_blank_and_an_operator_is() -> None:
    text = "vllm serve m --chat-template '$TP' --tokenizer \\$TP --revision 'x; y' --dtype \"$TP\" --a \\; --b 'c\\'\n"
    expected = {"chat-template": "$TP", "tokenizer": "$TP", "dtype": 8, "a": ";", "b": "c\\"}
    assert args(text) == expected
    ((echo, word),) = (command.words for command in commands('echo "a \\\n  b\\\\\n c"\n', "serve.sh"))
    assert (echo.text, word.text) == ("echo", "a   b\\\n c")
    (first, after) = commands("echo 'a #\n  b\"$X\n' # c\nafter", "serve.sh")
    assert (first.words[1].text, after.words[0].text, after.words[0].line) == ('a #\n  b"$X\n', "after", 4)


@each_row("empty", ["''", '""', '"$NONE"'])
def test_an_empty_word_in_quotes_is_a_word_and_an_empty_variable_is_none(empty: str) -> None:
    document = read(f"NONE=\nvllm serve $NONE $MODEL $NONE --tokenizer {empty} --seed 3\n").document
    assert document["model"]["id"] == "org/model"
    assert document["aggregated"]["args"] == {"tokenizer": "", "seed": 3}


@each_row("value, seed", [("${X:-${Y:-4}}", 4), ("${E:-${F:-4}}", 8), ("${E-4}0", 0), ("${F:?no}", 8), ("1${F}2", 182)])
def test_a_default_holds_where_there_is_no_value(value: str, seed: int) -> None:
    assert args(f"E=; F=8\nvllm serve m --seed {value}\n") == {"seed": seed}


@each_row("behind", [
    "> server.log 2>&1 &", ">server.log 2>&1", "&> log", "&>>log", "2> err", "2>err >out", "> >(tee log) 2>&1",
    "<in 9>x", "| tee log", "<<< text", "0<<-E\n\tx\n\tE",
])  # fmt: skip
def test_a_number_before_a_redirection_is_a_value_unless_it_touches_it(behind: str) -> None:
    assert read(f"vllm serve m --tensor-parallel-size 8 {behind}\n").document["aggregated"]["parallel"] == {"tp": 8}
    assert args("vllm serve m --max-model-len 32768&> log\n") == {"max-model-len": 32768}


@each_row("word", ["~/m", "*.json", "{a,b}"])
def test_a_word_that_a_shell_would_replace_by_files_is_refused(word: str) -> None:
    assert "the value at line 1" in refused(f"vllm serve m --x {word}\n")
    assert args(f"vllm serve m --x '{word}'\n") == {"x": word}


@each_row("script, env", [
    ("export X=1\nexport Y=2 Z=3", {"X": "1", "Y": "2", "Z": "3"}),
    ("X=1; export X; unset X", {}),
    ("export X=1; export -n X", {}),
    ("X=1 Y=2 python warmup.py", {}),
    ("cd /work && export X=4", {"X": "4"}),
    ("X=1; X+=2; export X", {"X": "12"}),
])  # fmt: skip
def test_what_is_exported_is_the_environment(script: str, env: dict[str, str]) -> None:
    assert read(f"{script}\nvllm serve m\n").document["aggregated"].get("env", {}) == env


@each_row("script, lost", [
    ("export MODE=$(mode)\nvllm serve m\n", ["export MODE"]),
    ("false || export MODE=1\nvllm serve m\n", ["export MODE"]),
    ("MODE=$(mode) vllm serve m\n", ["MODE"]),
    ("MODE=~/x vllm serve m\n", ["MODE"]),
    ("B=1\nB=2 MODE=$B vllm serve m\n", ["MODE"]),
    (". lib.sh\nvllm serve m\n", [". lib.sh"]),
    ("source v/bin/activate\nvllm serve m\n", []),
    ("exec numactl -m 0 vllm serve m\n", ["exec numactl"]),
    ("docker run --env=TOKEN=hunter2 i vllm serve m\n", ["docker"]),
    ("A=1 exec env B=2 nohup vllm serve m\n", []),
    ("export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES\nvllm serve m --port=$PORT\n", []),
])  # fmt: skip
def test_what_is_around_a_server_and_not_carried_over_is_a_loss(script: str, lost: list[str]) -> None:
    draft = read(script)
    assert [note.at.key for note in draft.losses()] == lost
    assert "hunter2" not in str(draft)


def test_a_command_beside_the_server_is_to_be_confirmed() -> None:
    assert list(notes(read("pip install x; mkdir y\nvllm serve m\n"), "confirm")) == ["`pip`", "the file's name"]


def test_keys_of_a_flag_are_put_together_and_a_beginning_of_several_names_is_none_of_them() -> None:
    found = {"a": {"b": ["x", "y", "z"], "c": 1}, "max-num": 3}
    assert args("vllm serve m --a.b+ x,y --a.b+ z --a.c 1 --max-num 3\n") == found


def test_a_server_may_be_started_as_a_module() -> None:
    draft = read("python3 -m vllm.entrypoints.openai.api_server --model org/m --seed 3 &\n")
    assert draft.document["model"]["id"] == "org/m"
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert draft.losses() == []


def test_lmcaches_server_beside_it_becomes_its_section() -> None:
    config = '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}'
    draft = read(f"lmcache server --l1-size-gb 64 &\nvllm serve m --kv-transfer-config '{config}'\n")
    assert draft.document["lmcache"] == {"l1_size_gb": 64, "on": ["aggregated"]}


def test_prefill_and_decode_are_told_apart_by_their_connectors() -> None:
    line = 'vllm serve m -tp 2 --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"%s"}\' &\n'
    document = read(line % "kv_producer" + line % "kv_consumer").document
    assert document["mode"] == "disaggregated"
    assert document["prefill"]["connector"] == document["decode"]["connector"] == {"kind": "nixl"}
    assert "a second server" in refused(line % "kv_both" + line % "kv_both")


def test_nixl_push_is_refused_once_with_the_reason() -> None:
    line = 'vllm serve m --kv-transfer-config \'{"kv_connector":"NixlPushConnector","kv_role":"%s"}\' &\n'
    with pytest.raises(RecipeError) as caught:
        read(line % "kv_producer" + line % "kv_consumer")
    assert caught.value.what.startswith("NIXL push is not supported: it ran on no device here")
    assert caught.value.cause == "NixlPushConnector in the --kv-transfer-config of prefill and decode"
    assert caught.value.where == "serve_b200.sh:1"
    assert "use kind: nixl (pull)" in str(caught.value.todo)


def test_a_secret_of_the_script_is_named_only() -> None:
    draft = read("export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\nvllm serve m\n")
    assert draft.document["aggregated"]["env"] == {"HF_TOKEN": {"secret": "HF_TOKEN"}}
    assert "abcdefghij" not in str(draft)


def test_the_model_is_the_first_word_that_belongs_to_no_flag() -> None:
    """As for vLLM, which knows how many words a flag takes."""
    draft = read("vllm serve --trust-remote-code --no-enable-prefix-caching --seed 3 $MODEL --enforce-eager stray")
    assert draft.document["model"]["id"] == "org/model"
    found = {"trust-remote-code": True, "enable-prefix-caching": False, "seed": 3, "enforce-eager": True}
    assert draft.document["aggregated"]["args"] == found
    assert notes(draft, "served") == {"vllm serve": "a word that belongs to no flag"}


def test_the_verb_takes_variables_and_the_hardware(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text('export ROCM_X=1\nvllm serve "$MODEL" -tp 2\n')
    verb = ("import", "serve.sh", "--var", "MODEL=org/x")
    assert "platform: rocm" in run(verb, tmp_path, {}).out
    assert "platform: rocm" not in run((*verb, "--hardware", "b200"), tmp_path, {}).out
    assert run(("import", "serve.sh", "--var", "MODEL"), tmp_path, {}).code == 2


def hostile(folder: Path, script: str, *, name: str = "launch.sh", **variables: str) -> RecipeError:
    """The error of `pdserve import`, which takes little CPU and names a fix."""
    file = folder / name
    file.write_text(script, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(RecipeError) as caught:
        import_file(file, ImportChoice(variables=variables))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 15, "it takes too long"
    assert caught.value.todo
    return caught.value


@each_row("script, said", [
    ("echo 'a" + "\nb" * 70_000 + "'\nvllm serve m\n", "1: the script cannot be read: a word of more than 64 KiB"),
    ("A=1\necho 'a" + "\nb" * 70_000 + "\nvllm serve m\n", "2: the script cannot be read: a quote that never ends"),
    ("vllm serve m --x $(echo\n", "1: the script cannot be read: a bracket that never ends"),
    ("vllm serve m <<E\nx\n", "2: the script cannot be read: no line E ends the text"),
    ("vllm serve m --x $'\\n'\n", "1: the script cannot be read: a quote $'...'"),
    ("A=" + "x" * 60_000 + "\nvllm serve m " + "$A" * 1000 + "\n", "its variables grow beyond 1 MiB"),
    ("vllm serve org/model -tp 999999999999999999999999\n", "devices are more than a plan is made for"),
])  # fmt: skip
def test_a_hostile_script_is_refused_in_no_time(tmp_path: Path, script: str, said: str) -> None:
    assert said in hostile(tmp_path, script).render()
