"""AISimulate's estimate of what one prefill and one decode instance can do (github.com/ai-dynamo/aisimulate).

It knows NVIDIA's devices and some of Intel's, and runs without one. Its pins (jax 0.4.38 in 0.13) are not those of an
engine environment, so it is a program on PATH and no import. It fetches the config.json of a model that it does not
ship from the hub.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.engines.experts import has_experts
from pdserve.plan.model import Plan
from pdserve.recipe import effective
from pdserve.recipe.model import Recipe
from pdserve.recipe.vllm_int import known_int
from pdserve.sizing.aisimulate import MOST_PREFILLS, Phase, Prediction, Rates, follows, not_asked, prediction_config
from pdserve.sizing.given import Given
from pdserve.system.process import output_of

PROGRAM = "aisimulate"
_SECONDS = 1800.0
_FIRST_PREFILLS = 8
_FIX = (
    "python -m venv ~/aisimulate && ~/aisimulate/bin/pip install --pre aisimulate, and put ~/aisimulate/bin on PATH; "
    "or give measured rates: --prefill-rate and --decode-rate"
)


def estimated(
    recipe: Recipe, plan: Plan, config: Mapping[str, object] | None, hardware: str, given: Given, *, path: str | None
) -> Given:
    """`given` with AISimulate's rates in place of those that are not there. `config`: the model's; `path`: where the
    program is looked for. Raises RecipeError for what it cannot be asked, PreflightError where it has no answer."""
    _check(recipe, given)
    program = _find(path)
    experts = config is not None and has_experts(config)

    def predict(phase: Phase, prefills: int = 1) -> Prediction:
        asked = prediction_config(recipe, plan.model, hardware, given, experts=experts, phase=phase, prefills=prefills)
        return _predict(program, asked, phase)

    filled = predict("prefill")
    prefills = _FIRST_PREFILLS
    while True:
        written = predict("decode", prefills)
        rates = _rates(filled, written, hardware)
        if follows(rates, given, prefills) or prefills >= MOST_PREFILLS:
            break
        prefills *= 4
    if left_out := not_asked(recipe):
        rates = rates.model_copy(update={"basis": f"{rates.basis}; without {', '.join(left_out)}"})
    if not follows(rates, given, prefills):
        basis = f"{rates.basis}; of decode at least, as {prefills} prefills do not fill one"
        rates = rates.model_copy(update={"basis": basis})
    return rates.into(given)


def _check(recipe: Recipe, given: Given) -> None:
    if recipe.platform != "cuda":
        raise RecipeError(
            f"AISimulate has no data of devices of the platform {recipe.platform}",
            where="platform",
            todo="leave --aisimulate out, and give measured rates: --prefill-rate and --decode-rate",
        )
    if recipe.mode != "disaggregated":
        raise RecipeError(
            "AISimulate is asked for the balance of prefill and decode, and this recipe has one pool",
            where="mode",
            todo="leave --aisimulate out",
        )
    if given.prefill_rate is not None and given.decode_rate is not None:
        raise RecipeError(
            "both rates are given, so there is nothing for AISimulate to estimate",
            todo="leave out --aisimulate, or the rate that it shall estimate",
        )
    if given.prompt_tokens is None or given.output_tokens is None:
        raise RecipeError(
            "AISimulate estimates rates for a length of prompts and of answers",
            todo="add --prompt-tokens and --output-tokens",
        )
    for _, role in recipe.roles():
        longest = known_int(effective.args_of(recipe, role), "max-model-len")
        if longest is not None and given.prompt_tokens + given.output_tokens > longest:
            raise RecipeError(
                f"a prompt of {given.prompt_tokens} tokens and an answer of {given.output_tokens} do not fit in "
                f"max-model-len {longest}",
                todo="shorter --prompt-tokens and --output-tokens, or a larger max-model-len",
            )


def _find(path: str | None) -> str:
    beside = str(Path(sys.executable).with_name(PROGRAM))
    if (program := shutil.which(PROGRAM, path=path) or shutil.which(beside)) is None:
        raise PreflightError(f"there is no program {PROGRAM}", cause="it is not installed, or not on PATH", todo=_FIX)
    return str(Path(program).absolute())


def _predict(program: str, asked: Mapping[str, object], phase: Phase) -> Prediction:
    with tempfile.TemporaryDirectory(prefix="pdserve-aisimulate-") as folder:
        config = Path(folder) / "prediction.yaml"
        config.write_text(json.dumps(asked), encoding="utf-8")  # JSON is YAML
        answer = output_of(
            [program, "predict", "--config", str(config), "--format", "json", "--output-dir", f"{folder}/out"],
            timeout=_SECONDS,
            cwd=Path(folder),
        )
    if answer.code != 0:
        said = answer.err.strip().splitlines() or [f"exit code {answer.code}"]
        raise PreflightError(
            f"AISimulate has no estimate of {phase}",
            cause="it knows neither the model nor the device nor the layout, or its version has another command line",
            todo="try the prediction below by hand (aisimulate predict --config FILE), or give measured rates",
            evidence=(json.dumps(asked), *said[-5:]),
        )
    try:
        prediction = Prediction.model_validate_json(answer.out.strip().splitlines()[-1])
    except (ValidationError, IndexError):
        raise PreflightError(
            f"AISimulate's answer for {phase} cannot be read",
            cause="pdserve reads the summary of aisimulate 0.13",
            todo="install that version, or give measured rates: --prefill-rate and --decode-rate",
            evidence=tuple(answer.out.strip().splitlines()[-3:]),
        ) from None
    if not prediction.completed_requests or not (
        prediction.input_throughput_tok_s and prediction.output_throughput_tok_s
    ):
        raise PreflightError(
            f"AISimulate's deployment completes no request ({phase})",
            cause=prediction.diagnostic or "prompt and answer do not fit in the KV of an instance",
            todo="shorter --prompt-tokens and --output-tokens, or more devices for an instance",
        )
    return prediction


def _rates(filled: Prediction, written: Prediction, hardware: str) -> Rates:
    assert filled.input_throughput_tok_s is not None
    assert written.output_throughput_tok_s is not None
    bases = {str(basis) for answer in (filled, written) for basis in answer.prediction_provenance.values()}
    return Rates(
        prefill=filled.input_throughput_tok_s,
        decode=written.output_throughput_tok_s,
        basis=f"AISimulate's estimate for {hardware} ({'; '.join(sorted(bases)) or 'it names no basis'}), not measured",
    )
