"""Options of `pdserve plan`: what neither the recipe nor the model states."""

from __future__ import annotations

from typing import Annotated

import typer


def _option(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, min=0.001, help=text)
    return info


DeviceMemory = Annotated[float | None, _option("device-memory", "GIB", "Memory of one device.")]
KvMemory = Annotated[float | None, _option("kv-memory", "GIB", "For KV on each rank, as an engine's log has it.")]
Link = Annotated[float | None, _option("link", "GBIT", "Rate between prefill and decode, Gbit/s.")]
Disk = Annotated[float | None, _option("disk", "GB", "Rate at which a node reads weights, GB/s.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt.")]
OutputTokens = Annotated[int | None, typer.Option("--output-tokens", min=1, help="Tokens of an answer.")]
PrefillRate = Annotated[
    float | None, _option("prefill-rate", "TOKENS", "Prompt tokens a second, one prefill instance.")
]
DecodeRate = Annotated[float | None, _option("decode-rate", "TOKENS", "Tokens a second of one decode instance.")]
QueueSeconds = Annotated[float | None, _option("queue-seconds", "SECONDS", "The longest wait in an engine's queue.")]
