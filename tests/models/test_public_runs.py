"""What is computed for public GPU runs, beside what their logs have; docs/plan.md shows the same."""

from __future__ import annotations

import pytest

from tests.docs.markdown import REPOSITORY, Page
from tests.models.public_runs import KV_RUNS, WEIGHT_RUNS, KvRun, WeightRun, error
from tests.tables import each_row

PAGE = Page(REPOSITORY / "docs" / "plan.md")
KV_ERROR, WEIGHT_ERROR = 0.012, 0.014
"""The largest errors, of Qwen3-235B and of Distill-Qwen-14B."""


@each_row("run", KV_RUNS)
def test_kv_of_a_public_run(run: KvRun) -> None:
    assert run.computed() == pytest.approx(run.held, rel=KV_ERROR)


@each_row("run", WEIGHT_RUNS)
def test_weights_of_a_public_run(run: WeightRun) -> None:
    assert run.computed() == pytest.approx(run.held_gib, rel=WEIGHT_ERROR)


def test_runs_of_six_threads_and_of_hybrids_are_among_them() -> None:
    assert len({run.source for run in KV_RUNS}) >= 6
    exact = [run for run in KV_RUNS if "full_attention_interval" in run.config]
    assert len(exact) == 2
    assert all(run.computed() == run.held for run in exact)


def test_the_page_shows_them() -> None:
    assert PAGE.table("log") == [kv_row(run) for run in KV_RUNS]
    assert PAGE.table("weights of") == [weight_row(run) for run in WEIGHT_RUNS]


def kv_row(run: KvRun) -> tuple[str, ...]:
    computed = run.computed()
    return (
        run.source,
        run.model,
        run.hardware,
        f"{run.kv_gib:g}",
        f"{run.held:,g} {run.unit}" if run.held < 1e4 else f"{run.held:,.0f} {run.unit}",
        f"{computed:,g}" if computed < 1e4 else f"{computed:,.0f}",
        error(computed, run.held),
    )


def weight_row(run: WeightRun) -> tuple[str, ...]:
    computed = run.computed()
    return (run.source, run.model, f"{run.held_gib:g}", f"{computed:g}", error(computed, run.held_gib))
