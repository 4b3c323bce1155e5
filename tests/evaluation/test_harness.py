"""What the harness is given, and how its results are read: no process, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import NotProvenError, PreflightError, VerifyError
from pdserve.evaluation import EvalSettings, EvalVerdict, configuration, environment, find_harness, read_score
from tests.plan import kit

GSM8K: dict[str, Any] = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.75,
            "exact_match_stderr,strict-match": 0.02,
            "exact_match,flexible-extract": 0.8,
            "exact_match_stderr,flexible-extract": "N/A",
        }
    },
    "n-samples": {"gsm8k": {"original": 1319, "effective": 100}},
    "higher_is_better": {"gsm8k": {"exact_match": True}},
}


def results(**figures: Any) -> dict[str, Any]:
    return {
        "results": {"task": {"alias": "task", **figures}},
        "n-samples": {"task": {"original": 5, "effective": 5}},
        "higher_is_better": {"task": {"perplexity": False, "acc": True}},
    }


class TestConfiguration:
    def test_the_proxy_is_asked_with_text_and_without_retries(self) -> None:
        plan = kit.plan(kit.recipe())
        given = configuration(plan, EvalSettings(task="gsm8k", threshold=0.5, limit=10), Path("/results"))
        assert given["model"] == "local-completions"
        assert given["model_args"]["base_url"] == f"{plan.proxy_url}/v1/completions"
        assert given["model_args"]["max_retries"] == 1
        assert given["model_args"]["tokenized_requests"] is False
        assert (given["tasks"], given["limit"], given["output_path"]) == (["gsm8k"], 10, "/results")
        assert "num_fewshot" not in given, "the task has its own number"

    def test_the_key_is_in_the_environment_only(self) -> None:
        plan = kit.plan(kit.recipe())
        given = environment(plan, {"PATH": "/bin", "NO_PROXY": "example.org"}, "the-key")
        assert given["OPENAI_API_KEY"] == "the-key"
        assert given["NO_PROXY"] == given["no_proxy"] == f"example.org,{plan.proxy.host}"
        assert "the-key" not in json.dumps(configuration(plan, EvalSettings(task="t", threshold=1), Path("/r")))


class TestScore:
    def test_of_several_metrics_the_named_one(self) -> None:
        strict = read_score(GSM8K, "exact_match,strict-match", "results.json")
        assert (strict.value, strict.stderr, strict.questions) == (0.75, 0.02, 100)
        assert read_score(GSM8K, "exact_match,flexible-extract", "results.json").stderr is None

    @pytest.mark.parametrize("metric", [None, "acc,none"])
    def test_an_ambiguous_or_unknown_metric_is_answered_with_those_that_there_are(self, metric: str | None) -> None:
        with pytest.raises(NotProvenError) as refused:
            read_score(GSM8K, metric, "results.json")
        assert refused.value.todo == "give --metric: 'exact_match,strict-match', 'exact_match,flexible-extract'"

    def test_a_metric_of_which_less_is_better_has_no_threshold(self) -> None:
        with pytest.raises(NotProvenError, match="less is better"):
            read_score(results(**{"perplexity,none": 12.5}), None, "results.json")

    @pytest.mark.parametrize("document", [{}, {"results": {}}, {"results": []}, {"results": {"t": {"acc,none": 1}}}])
    def test_other_results_are_not_a_score(self, document: dict[str, Any]) -> None:
        with pytest.raises(NotProvenError, match="cannot be read"):
            read_score(document, None, "results.json")

    def test_a_group_of_tasks_is_not_one_score(self) -> None:
        group = results(**{"acc,none": 1}) | {"results": {"mmlu": {"acc,none": 0.5}, "mmlu_law": {"acc,none": 0.4}}}
        with pytest.raises(NotProvenError, match="of 2 tasks"):
            read_score(group | {"n-samples": {}}, None, "results.json")


def test_the_mean_has_to_reach_the_threshold() -> None:
    known: dict[str, Any] = {
        "deployment": "tiny",
        "task": "gsm8k",
        "metric": "acc",
        "questions": 4,
        "stderr": None,
        "folder": "/run",
    }
    EvalVerdict(**known, scores=(0.25, 0.75), threshold=0.5).raise_for_status()
    with pytest.raises(VerifyError, match=r"acc is 0\.4500, at least 0\.5 was asked for") as below:
        EvalVerdict(**known, scores=(0.2, 0.7), threshold=0.5).raise_for_status()
    assert below.value.exit_code == 6
    assert "/run" in (below.value.todo or "")


class TestProgram:
    def test_without_the_harness_the_error_has_the_line_that_installs_it(self) -> None:
        with pytest.raises(PreflightError) as missing:
            find_harness(None, {"PATH": "/nowhere"})
        assert "pip install 'lm-eval[api]" in (missing.value.todo or "")

    def test_a_wrong_path_is_not_replaced_by_another_program(self) -> None:
        with pytest.raises(PreflightError, match="/nowhere/lm_eval"):
            find_harness("/nowhere/lm_eval", {"PATH": "/bin"})
