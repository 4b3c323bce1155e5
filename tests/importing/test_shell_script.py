"""Shell scripts with `vllm serve`: read as a shell would, and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.choice import ImportChoice
from pdserve.importing.formats import imported
from pdserve.importing.launch import Draft
from tests.importing.kit import notes
from tests.messages.kit import run
from tests.tables import each_row

SCRIPT = """\
#!/usr/bin/env bash
source "$(dirname "$0")/lib.sh"
export VLLM_LOGGING_LEVEL=INFO   # a comment
EXTRA="--max-num-seqs $((CONC * 2))"
PARALLEL=(--tensor-parallel-size "$TP")
if [ "${DP:-false}" = "true" ]; then
    PARALLEL=(--tensor-parallel-size 1 --data-parallel-size "$TP")
else
    export NOT_DP=1
fi
if [[ "${EP:-1}" -gt 1 ]]; then PARALLEL+=(--enable-expert-parallel); fi
set -x
UCX_TLS=rc vllm serve "$MODEL" --host 0.0.0.0 --port $PORT \\
    "${PARALLEL[@]}" \\
    $EXTRA \\
    --compilation-config '{"cudagraph_mode":"PIECEWISE"}' \\
    --speculative-config "{\\"method\\": \\"mtp\\", \\"num_speculative_tokens\\": $SPEC}" \\
    --attention_config.use_fp4_indexer_cache True \\
    --no-enable-prefix-caching > server.log 2>&1 &
echo "vllm serve is up" | cat
cat <<EOF
vllm serve never
EOF
"""
GIVEN = {"TP": "8", "MODEL": "org/model", "CONC": "32", "SPEC": "2"}


def read(text: str, **variables: str) -> Draft:
    return imported(text, "serve_b200.sh", ImportChoice(variables={**GIVEN, **variables}))


def asked(text: str, **variables: str) -> str:
    with pytest.raises(RecipeError) as caught:
        imported(text, "serve.sh", ImportChoice(variables=variables))
    assert caught.value.todo
    return f"{caught.value.what} {caught.value.todo}"


def test_the_command_line_is_what_the_shell_would_make_of_it() -> None:
    document = read(SCRIPT).document
    assert document["model"] == {"id": "org/model", "served_name": "org/model"}
    assert document["aggregated"]["parallel"] == {"tp": 8}
    assert document["aggregated"]["args"] == {
        "max-num-seqs": 64,
        "compilation-config": {"cudagraph_mode": "PIECEWISE"},
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 2},
        "attention-config": {"use_fp4_indexer_cache": "True"},
        "enable-prefix-caching": False,
    }
    assert document["aggregated"]["env"] == {"VLLM_LOGGING_LEVEL": "INFO", "NOT_DP": "1", "UCX_TLS": "rc"}


def test_each_value_has_the_line_of_its_word() -> None:
    origins = read(SCRIPT).origins
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "--compilation-config" in text)
    assert origins["aggregated", "args", "compilation-config"] == f"{line}: --compilation-config"


def test_a_branch_is_taken_by_the_variables_that_are_given() -> None:
    draft = read(SCRIPT, DP="true", EP="2")
    assert draft.document["aggregated"]["parallel"] == {"dp": 8, "ep": True}
    assert "NOT_DP" not in draft.document["aggregated"]["env"]


def test_variables_that_the_caller_must_give_are_asked_for_all_at_once() -> None:
    text = asked(SCRIPT)
    for name in ("MODEL", "TP", "CONC", "SPEC"):
        assert f"--var {name}=..." in text
    assert "PORT" not in text, "pdserve sets the port"


def test_a_branch_that_depends_on_a_missing_variable_makes_its_assignments_unknown() -> None:
    text = SCRIPT.replace("${DP:-false}", "$DP")
    assert "--var DP=..." in asked(text, **GIVEN)


def test_more_behind_an_unknown_array_is_unknown_too() -> None:
    text = 'ARGS=($(args))\nARGS+=(--seed 1)\nvllm serve m --port $PORT "${ARGS[@]}"\n'
    assert "--var ARGS=..." in asked(text)


def test_what_is_known_only_when_the_script_runs_is_asked_for() -> None:
    assert "--var TP=..." in asked('TP=$(nvidia-smi -L | wc -l)\nvllm serve m -tp "$TP"\n')
    assert "--var X=..." in asked("for X in 1 2; do vllm serve m --max-num-seqs $X; done\n")
    assert read('TP=$(nvidia-smi)\nvllm serve m -tp "$TP"\n').document["aggregated"]["parallel"] == {"tp": 8}


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    read(f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\nvllm serve m\n")
    assert not mark.exists()


def test_quotes_decide_whether_a_dollar_is_one() -> None:
    args = read("vllm serve m --chat-template '$TP' --tokenizer \\$TP --revision x --dtype \"$TP\"\n").document
    assert args["aggregated"]["args"] == {"chat-template": "$TP", "tokenizer": "$TP", "dtype": 8}


def test_prefill_and_decode_are_told_apart_by_their_connectors() -> None:
    line = 'vllm serve m -tp 2 --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"%s"}\' &\n'
    document = read(line % "kv_producer" + line % "kv_consumer").document
    assert document["mode"] == "disaggregated"
    assert document["prefill"]["connector"] == document["decode"]["connector"] == {"kind": "nixl"}
    assert "a second server" in asked(line % "kv_both" + line % "kv_both")


def test_nixl_push_is_refused_once_with_the_reason() -> None:
    line = 'vllm serve m --kv-transfer-config \'{"kv_connector":"NixlPushConnector","kv_role":"%s"}\' &\n'
    with pytest.raises(RecipeError) as caught:
        read(line % "kv_producer" + line % "kv_consumer")
    assert caught.value.what.startswith("NIXL push is not supported: it ran on no device here")
    assert caught.value.cause == "NixlPushConnector in the --kv-transfer-config of prefill and decode"
    assert caught.value.where == "serve_b200.sh:1"
    assert "use kind: nixl (pull)" in str(caught.value.todo)


@each_row(
    "extra",
    [
        '{"push_registration_timeout":900}',
        '{"unknown_key":1}',
        '{"connectors":[{"kv_connector":"NixlPushConnector"},{"kv_connector":"LMCacheMPConnector"}]}',
    ],
)
def test_nixl_push_is_refused_in_a_mapping_that_no_section_makes_and_in_a_multi(extra: str) -> None:
    name = "MultiConnector" if "connectors" in extra else "NixlPushConnector"
    mapping = f'{{"kv_connector":"{name}","kv_role":"%s","kv_connector_extra_config":{extra}}}'
    line = f"vllm serve m --kv-transfer-config '{mapping}' &\n"
    assert "NIXL push is not supported" in asked(line % "kv_producer" + line % "kv_consumer")


def test_a_secret_of_the_script_is_named_only() -> None:
    draft = read("export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\nvllm serve m\n")
    assert draft.document["aggregated"]["env"] == {"HF_TOKEN": {"secret": "HF_TOKEN"}}
    assert "abcdefghij" not in str(draft)


def test_devices_and_ports_of_the_caller_are_pdserves() -> None:
    draft = read("export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES\nvllm serve m --port=$PORT\n")
    assert draft.losses() == []
    assert len(notes(draft, "replaced")) == 2


def test_a_variable_whose_value_is_not_known_is_a_loss() -> None:
    assert [note.at.key for note in read("export MODE=$(mode)\nvllm serve m\n").losses()] == ["export MODE"]


@each_row("text", ["if false; then\nvllm serve m\nfi\n", "echo 'vllm serve\n", "vllm serve\n"])
def test_a_script_without_a_server_is_refused(text: str) -> None:
    assert asked(text)


def test_the_verb_takes_variables(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text('vllm serve "$MODEL" -tp 2\n')
    assert run(("import", "serve.sh", "--flags-from", "list", "--var", "MODEL=org/x"), tmp_path, {}).code == 0
    assert run(("import", "serve.sh", "--var", "MODEL"), tmp_path, {}).code == 2


@each_row("empty", ["''", '""', '"$NONE"'])
def test_an_empty_word_in_quotes_is_a_word(empty: str) -> None:
    document = read(f"NONE=\nvllm serve $MODEL --tokenizer {empty} --seed 3\n").document
    assert document["aggregated"]["args"] == {"tokenizer": "", "seed": 3}


def test_an_empty_variable_outside_of_quotes_is_no_word() -> None:
    document = read("NONE=\nvllm serve $NONE $MODEL $NONE --seed 3\n").document
    assert document["model"]["id"] == "org/model"
    assert document["aggregated"]["args"] == {"seed": 3}


@each_row("test", ["[ '' ]", "[ -n '' ]", "[[ '' != \"\" ]]"])
def test_a_test_of_an_empty_word_does_not_hold(test: str) -> None:
    document = read(f"if {test}; then SEED=1; else SEED=2; fi\nvllm serve $MODEL --seed $SEED\n").document
    assert document["aggregated"]["args"] == {"seed": 2}


def test_the_model_is_the_first_word_that_belongs_to_no_flag() -> None:
    """As for vLLM, which knows how many words a flag takes."""
    draft = read("vllm serve --trust-remote-code --no-enable-prefix-caching --seed 3 $MODEL --enforce-eager stray")
    assert draft.document["model"]["id"] == "org/model"
    args = {"trust-remote-code": True, "enable-prefix-caching": False, "seed": 3, "enforce-eager": True}
    assert draft.document["aggregated"]["args"] == args
    assert notes(draft, "served") == {"vllm serve": "a word that belongs to no flag"}


def test_what_is_asked_for_and_noted_comes_in_the_same_order_each_time() -> None:
    """Whatever the seed of the hashes is."""
    names = ["A1", "B2", "C3", "D4", "E5", "F6", "G7"]
    test = "".join(f"${name}" for name in names)
    text = f'if [ "{test}" = x ]; then T=1; else T=2; fi\nvllm serve m --tokenizer $T\n'
    assert f"no value of {', '.join(names)} " in asked(text)
    draft = read("".join(f"export {name}=$(cmd)\n" for name in names) + "vllm serve $MODEL\n")
    assert [note.at.key for note in draft.notes if "not known" in note.why] == [f"export {name}" for name in names]
