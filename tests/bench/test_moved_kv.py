"""The KV that was moved between engines: whichever connector and side counts it, in the window and in the table."""

from __future__ import annotations

from rich.console import Console

from pdserve.bench.result import Window
from pdserve.bench.snapshot import ENGINE, counts, growth
from pdserve.cli.bench import windows
from pdserve.observe.metrics import samples_of
from tests.bench.test_compare import measured, result


def test_bytes_and_seconds_of_mooncake_are_those_of_prefill() -> None:
    """Prefill writes; decode has the same series, at 0."""
    page = """
vllm:mooncake_bytes_transferred_bucket{{engine="0",le="+Inf",model_name="tiny"}} 9
vllm:mooncake_bytes_transferred_sum{{engine="0",model_name="tiny"}} {0}
vllm:mooncake_bytes_transferred_sum{{engine="1",model_name="tiny"}} {0}
vllm:mooncake_xfer_time_seconds_sum{{engine="0",model_name="tiny"}} {1}
"""
    before, after_, decode = (
        counts(samples_of(page.format(*values)), ENGINE) for values in ((1024, 0.5), (3 * 2**20, 2.5), (0, 0))
    )
    prefill = growth(before, after_)
    assert prefill == {"mooncake_bytes": 2 * (3 * 2**20 - 1024), "mooncake_seconds": 2.0}
    window = Window(prefill=prefill, decode=growth(decode, decode))
    assert (window.moved_bytes, window.moved_seconds) == (prefill["mooncake_bytes"], 2.0)


def test_bytes_of_nixl_are_those_of_the_side_that_starts_the_transfer() -> None:
    window = Window(prefill={"nixl_bytes": 0.0}, decode={"nixl_bytes": 5.0, "nixl_seconds": 0.5})
    assert (window.moved_bytes, window.moved_seconds) == (5.0, 0.5)


def test_what_no_engine_counts_is_not_zero_bytes() -> None:
    assert (Window().moved_bytes, Window().moved_seconds) == (None, None)


def test_the_table_has_it_in_mib_and_seconds() -> None:
    moved = Window(prefill={"mooncake_bytes": 2.5 * 2**20, "mooncake_seconds": 0.25}, decode={"mooncake_bytes": 0.0})
    of_both = [measured(0.1).model_copy(update={"window": window}) for window in (moved, Window())]
    console = Console(width=300)
    with console.capture() as shown:
        console.print(windows(result(*of_both)))
    assert "KV moved, MiB / s" in shown.get()
    assert "2.5 / 0.25" in shown.get()
    assert "- / -" in shown.get()
