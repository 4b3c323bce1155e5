"""What AISimulate is asked of a recipe, and the rates that its answers give. Pure.

Its `predict` (aisimulate 0.13, config/cli.py, config/engine.py) simulates traffic through workers of both roles. The
rate of one instance is the throughput of a deployment in which it alone is the limit: of prefill with answers of
two tokens, of decode behind more prefill workers than it can follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.plan.frozen import Frozen
from pdserve.recipe import effective
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.vllm_int import known_int
from pdserve.sizing.given import Given

Phase = Literal["prefill", "decode"]
FEW_TOKENS = 2
"""Of an answer: decode does almost nothing."""
DECODES = 4
"""Workers beside one prefill that is measured."""
MOST_PREFILLS = 512
_AT_ONCE = 256
"""Requests of a decode instance whose recipe has no max-num-seqs: AISimulate's own default."""
_BATCH_TOKENS = 8192
_ROUNDS = 8
"""Requests for each one at a time: the first and the last ones see a deployment that is not full."""
_NOT_ASKED = {
    "kv-cache-dtype",
    "speculative-config",
    "quantization",
    "block-size",
    "max-num-partial-prefills",
    "spec-model",
}
_SCHEDULER = {"max-num-batched-tokens": "max_batched_tokens", "max-num-seqs": "max_sequences"}


class EstimateBasis(BaseModel):
    """What a role's estimate rests on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    estimator: str | None = None
    data_version: str | None = None
    unavailable_reason: str | None = None

    def __str__(self) -> str:
        if self.estimator is None:
            return self.unavailable_reason or "nothing that it names"
        return f"{self.estimator}, data of vLLM {self.data_version or 'of no named version'}"


class Prediction(BaseModel):
    """Of its summary what is read."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    completed_requests: Annotated[int, Field(ge=0)]
    input_throughput_tok_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    output_throughput_tok_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    diagnostic: str | None = None
    prediction_provenance: Mapping[str, EstimateBasis] = {}


class Rates(Frozen):
    """Tokens a second of one instance, as AISimulate estimates them."""

    prefill: float
    decode: float
    basis: str
    """For people."""

    def into(self, given: Given) -> Given:
        """Rates that are given hold, and are no estimates."""
        estimated = {
            name: rate
            for name, rate in (("prefill", self.prefill), ("decode", self.decode))
            if getattr(given, f"{name}_rate") is None
        }
        basis = self.basis if len(estimated) > 1 else f"{''.join(estimated)}: {self.basis}"
        return given.model_copy(
            update={"rates_from": basis, **{f"{name}_rate": rate for name, rate in estimated.items()}}
        )


def not_asked(recipe: Recipe) -> list[str]:
    """Flags of the recipe that change a rate and are no part of the question."""
    given = {name for _, role in recipe.roles() for name in effective.args_of(recipe, role)}
    return sorted(given & _NOT_ASKED)


def prediction_config(
    recipe: Recipe, model: str, hardware: str, given: Given, *, experts: bool, phase: Phase, prefills: int = 1
) -> dict[str, Any]:
    """`prefills`: workers in front of the one decode that is measured."""
    assert given.prompt_tokens is not None
    assert given.output_tokens is not None
    roles = dict(recipe.roles())
    decode = roles["decode"]
    if phase == "prefill":
        at_once, output, replicas = (
            _full_prefill(recipe, roles["prefill"], given.prompt_tokens),
            FEW_TOKENS,
            (1, DECODES),
        )
    else:
        limit = effective.args_of(recipe, decode).get("max-num-seqs")
        at_once = (limit if isinstance(limit, int) else _AT_ONCE) * decode.parallel.dp
        output, replicas = given.output_tokens, (prefills, 1)
    source = {"type": "synthetic", "input_tokens": given.prompt_tokens, "output_tokens": output}
    return {
        "traffic": {
            "source": source,
            "load": {"type": "concurrency", "concurrency": at_once},
            "stop": {"requests": _ROUNDS * at_once},
        },
        "engine": {
            "mode": "disaggregated",
            "model": model,
            "hardware": hardware,
            "backend": "vllm",
            "workers": {
                "prefill": _worker(recipe, roles["prefill"], replicas[0], experts=experts),
                "decode": _worker(recipe, decode, replicas[1], experts=experts),
            },
        },
    }


def _full_prefill(recipe: Recipe, prefill: Role, prompt: int) -> int:
    """Requests that keep every rank in whole batches, with as many waiting."""
    tokens = known_int(effective.args_of(recipe, prefill), "max-num-batched-tokens") or _BATCH_TOKENS
    return 2 * prefill.parallel.dp * max(2, -(-tokens // prompt))


def _worker(recipe: Recipe, role: Role, replicas: int, *, experts: bool) -> dict[str, Any]:
    args, parallel = effective.args_of(recipe, role), role.parallel
    layout: dict[str, int] = {
        "replicas": replicas,
        "tensor": parallel.tp,
        "pipeline": parallel.pp,
        "attention_data": parallel.dp,
    }
    if experts:
        layout["moe_expert" if parallel.ep else "moe_tensor"] = parallel.tp * parallel.dp
    worker: dict[str, Any] = {"parallelism": layout}
    if length := known_int(args, "max-model-len"):
        worker["context_length"] = length
    if scheduler := {theirs: number for ours, theirs in _SCHEDULER.items() if (number := known_int(args, ours))}:
        worker["scheduler"] = scheduler
    if isinstance(memory := args.get("gpu-memory-utilization"), int | float):
        worker["kv_cache"] = {"capacity": {"type": "default", "memory_fraction": memory}}
    return worker


def follows(rates: Rates, given: Given, prefills: int) -> bool:
    """Whether so many prefill workers had more to give than decode took, by half: else decode was not the limit."""
    assert given.prompt_tokens is not None
    assert given.output_tokens is not None
    return prefills * rates.prefill / given.prompt_tokens >= 1.5 * rates.decode / given.output_tokens
