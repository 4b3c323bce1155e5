"""What each layer of a model keeps for a request, by its config.json: K and V of every token, of a window, or a state.

The rules are those of vLLM 0.32's model classes; tests/upstream/test_model_kv.py compares. A model whose layers are not
known is refused with the reason: a number for another architecture would look as good as the right number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.models import kinds
from pdserve.models.config_json import texts
from pdserve.models.heads import head_size_of, kv_heads_of, latent_size_of, number_of
from pdserve.models.state import State, state_of
from pdserve.models.unknown import UnknownModelError

Keeps = Literal["full", "window", "chunk", "recurrent"]
_LETTERS: Mapping[str, Keeps] = {"M": "recurrent", "*": "full"}
"""Of hybrid_override_pattern; the others keep nothing."""


@dataclass(frozen=True)
class Layer:
    """A layer that keeps KV. A layer without any (an MLP between mamba layers) is left out."""

    index: int
    keeps: Keeps
    kv_heads: int = 0
    """Over all TP ranks. MLA: one latent vector, which every rank holds whole."""
    head_size: int = 0
    value_size: int = 0
    """0: MLA, which keeps no V."""
    reach: int = 0
    """Tokens of the window or of the chunk."""
    state: State | None = None

    @property
    def latent(self) -> bool:
        """MLA."""
        return self.state is None and self.value_size == 0

    def elements(self, tp: int) -> int:
        """Numbers that one rank keeps of one token."""
        heads = 1 if self.latent else max(1, self.kv_heads // tp)
        return heads * (self.head_size + self.value_size)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    return next(text for text in texts(config) if "num_hidden_layers" in text or text is config)


def layers_of(config: Mapping[str, Any], *, drafts: bool = False) -> tuple[Layer, ...]:
    """The layers that keep KV. `drafts`: those of the model's own MTP modules too, as when it drafts for itself.

    Raises UnknownModelError.
    """
    text = text_config(config)
    number = number_of(text, "num_hidden_layers")
    named = list(_keeps(text, number))
    if drafts:
        # vLLM appends them: attention over everything, as in the last full layers of the model.
        modules = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
        if not modules:
            raise UnknownModelError("its config.json names no MTP modules (num_nextn_predict_layers)")
        if len(text.get("layer_types") or ()) > number:
            raise UnknownModelError("what its MTP modules keep is not known here (layer_types)")
        named += ["full"] * modules
    return tuple(_layer(text, index, keeps) for index, keeps in enumerate(named) if keeps is not None)


def _layer(text: Mapping[str, Any], index: int, keeps: Keeps) -> Layer:
    if keeps == "recurrent":
        state = state_of(text)
        if state is None:
            raise UnknownModelError(f"the recurrent state of {text.get('model_type')!r} models is not known here")
        return Layer(index, keeps, state=state)
    reach = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(keeps)
    window = number_of(text, reach) if reach else 0
    if latent := latent_size_of(text):
        return Layer(index, keeps, 1, latent, reach=window)
    size = head_size_of(text)
    return Layer(index, keeps, kv_heads_of(text), size, size, reach=window)


def _keeps(text: Mapping[str, Any], number: int) -> Iterator[Keeps | None]:
    """Layer by layer; None: it keeps nothing."""
    model = str(text.get("model_type", ""))
    if text.get("compress_ratios"):
        raise UnknownModelError("compressed attention (compress_ratios) is not known here")
    if text.get("num_kv_shared_layers"):
        raise UnknownModelError("some of its layers use the KV of others (num_kv_shared_layers)")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        yield from (_LETTERS.get(letter) for letter in pattern)
        return
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, Sequence) and not isinstance(named, str):
        if len(named) < number:
            raise UnknownModelError(f"its config.json names the kinds of {len(named)} layers, and it has {number}")
        yield from (_named(kind, text) for kind in named[:number])  # what follows are MTP modules (Step3p5)
        return
    if text.get("attn_type_list") or text.get("linear_attn_config") or model in ("falcon_h1", "zamba2"):
        raise UnknownModelError(f"which layers of {model!r} models keep what is not known here")
    if interval := text.get("full_attention_interval"):
        yield from _full_where(((index + 1) % interval == 0 for index in range(number)), "recurrent")
    elif period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset", 0)
        yield from _full_where((index % period == offset for index in range(number)), "recurrent")
    elif text.get("attention_chunk_size") and not model.startswith("mimo"):
        rope = text.get("no_rope_layers") or [(index + 1) % 4 for index in range(number)]
        if len(rope) < number:
            raise UnknownModelError(f"its no_rope_layers has {len(rope)} entries for {number} layers")
        yield from _full_where((not rope[index] for index in range(number)), "chunk")
    elif any(text.get(key) for key in kinds.STATE_KEYS):
        yield from _full_where([False] * number, "recurrent")
    elif kinds.has_window(text):
        yield from _windows(text, model, number)
    else:
        yield from _full_where([True] * number, "window")


def _windows(text: Mapping[str, Any], model: str, number: int) -> Iterator[Keeps]:
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
    if pattern is None and model in _PATTERNS:
        pattern = _PATTERNS[model]
    if text.get("use_sliding_window") and text.get("max_window_layers") not in (None, 0):
        raise UnknownModelError("only some of its layers have a window, and by a key of its own (max_window_layers)")
    if pattern is None and model in kinds.INTERLEAVED:
        raise UnknownModelError(
            f"its config.json does not state which layers have a window ({model!r} without layer_types)"
        )
    if not isinstance(pattern, int) or pattern <= 1:
        pattern = number + 1  # all of them
    yield from _full_where(((index + 1) % pattern == 0 for index in range(number)), "window")


def _full_where(full: Iterable[bool], others: Keeps) -> Iterator[Keeps]:
    for is_full in full:
        yield "full" if is_full else others


_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers attention is full, where the config leaves it to the class."""


def _named(kind: object, text: Mapping[str, Any]) -> Keeps | None:
    kept = kinds.kind_of(kind, text)
    if kept is None:
        return None
    if len(kept) > 1 or kept[0] not in ("full", "window", "recurrent"):
        raise UnknownModelError(f"what layers of the type {kind!r} keep is not known here")
    if kept[0] == "window":
        return "chunk" if kind == "chunked_attention" else "window"
    return "full" if kept[0] == "full" else "recurrent"
