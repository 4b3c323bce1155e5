"""LMCache without compiled kernels must be able to copy KV between an engine's blocks and its chunks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.errors import StartError
from pdserve.patches import effects
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

SWITCH = "LMCACHE_ROCM_MP_BLOCK_FALLBACK"
"""1 in `lmcache.env` asks for this patch."""
DTYPE = "LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE"
"""bfloat16 (the default), float16 or float32: the width of an element where LMCache does not say it. It copies bytes,
so nothing else of the type matters."""

_NAME = "lmcache-block-copy"
_OPERATION = "multi_layer_block_kv_transfer"
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MLA = "NL_X_NB_BS_HS"
_KV_THEN_BLOCKS = "NL_X_TWO_NB_BS_NH_HS"
_BLOCKS_THEN_KV = "NL_X_NB_TWO_BS_NH_HS"

FromPointer = Callable[[int, tuple[int, ...], Any, Any], Any]
"""(address, shape, dtype, device) -> a tensor over that memory: LMCache's own."""


def apply() -> None:
    """Gives LMCache's Python operations the missing one, and orders their copies; with compiled kernels, nothing.

    Raises StartError when DTYPE names no type that it knows.
    """
    width = default_width(os.environ.get(DTYPE))
    importlib.import_module("lmcache")
    operations: Any = importlib.import_module("lmcache.c_ops")
    if hasattr(operations, _OPERATION):
        return
    setattr(operations, _OPERATION, block_copy(operations._tensor_from_ptr, width))
    wrap(operations, "lmcache_memcpy_async", patch=_NAME, around=lambda original: _ordered(original, operations))


def default_width(text: str | None) -> int:
    """Bytes of an element where LMCache's descriptor says 0. Raises StartError."""
    name = (text or "").strip() or "bfloat16"
    if name not in _DTYPE_BYTES:
        raise StartError(f"{DTYPE}={name} is none of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def block_copy(from_pointer: FromPointer, width: int) -> Callable[..., None]:
    """The operation with the signature that LMCache 0.4.5 and 0.4.6 call."""

    def multi_layer_block_kv_transfer(
        layer_pointers: Any,
        chunk_pointers: Sequence[int],
        block_ids: Any,
        device: Any,
        direction: Any,
        shape: Any,
        chunk_slots: int,
        kv_format: Any,
        skip_blocks: int = 0,
    ) -> None:
        """`layer_pointers`: an engine's paged KV, one a layer; `chunk_pointers`: buffers of `chunk_slots` slots on the
        same device; `block_ids`: those of all chunks in turn, of which the first `skip_blocks` are left alone."""
        import torch

        if direction.name not in ("D2H", "H2D"):
            raise ValueError(f"direction {direction!r} is neither D2H nor H2D")
        bs = int(shape.bs)
        if bs <= 0 or chunk_slots <= 0 or chunk_slots % bs:
            raise ValueError(f"a chunk of {chunk_slots} slots does not consist of whole blocks of {bs}")
        dtype = _integer(int(shape.element_size) or width)
        pointers = layer_pointers.tolist() if isinstance(layer_pointers, torch.Tensor) else layer_pointers
        layers = [_paged(from_pointer, pointer, shape, kv_format.name, dtype, device) for pointer in pointers]
        block_ids = torch.as_tensor(block_ids, dtype=torch.long, device=device)
        per_chunk = chunk_slots // bs
        for index, pointer in enumerate(chunk_pointers):
            first = max(skip_blocks, index * per_chunk)
            ids = block_ids[first : (index + 1) * per_chunk]
            if len(ids) == 0:
                continue
            whole = (int(shape.kv_size), len(layers), per_chunk, bs, int(shape.nh) * int(shape.hs))
            begin = first - index * per_chunk
            chunk = from_pointer(pointer, whole, dtype, device)[:, :, begin : begin + len(ids)]
            for layer, paged in enumerate(layers):
                if direction.name == "D2H":
                    chunk[:, layer].copy_(paged.index_select(1, ids))
                else:
                    paged.index_copy_(1, ids, chunk[:, layer].contiguous())
        effects.count(_NAME, "copies")

    return multi_layer_block_kv_transfer


def _paged(from_pointer: FromPointer, pointer: int, shape: Any, kv_format: str, dtype: Any, device: Any) -> Any:
    """One layer as [kv, block, slot, head and element], a view of the engine's memory.

    A padded pool has a wider step from block to block than its blocks are wide (block_stride_elems).
    """
    nb, bs, kv, row = int(shape.nb), int(shape.bs), int(shape.kv_size), int(shape.nh) * int(shape.hs)
    steps = {
        _MLA: (0, bs * row),
        _KV_THEN_BLOCKS: (nb * bs * row, bs * row),
        _BLOCKS_THEN_KV: (bs * row, kv * bs * row),
    }
    if kv_format not in steps or (kv_format == _MLA) != (kv == 1):
        raise NotImplementedError(f"{_NAME} does not copy KV of the layout {kv_format} with kv_size {kv}")
    kv_step, block_step = steps[kv_format]
    stride = int(shape.block_stride_elems)
    if stride and stride != block_step:
        if kv_format == _KV_THEN_BLOCKS:
            raise NotImplementedError(f"{_NAME} does not copy padded blocks of the layout {kv_format}")
        block_step = stride
    elements = (nb - 1) * block_step + (kv - 1) * kv_step + bs * row
    flat = from_pointer(pointer, (elements,), dtype, device)
    return flat.as_strided((kv, nb, bs, row), (kv_step, block_step, row, 1))


def _integer(width: int) -> Any:
    """An integer type of that many bytes: bits survive a copy, whatever the KV's own type is."""
    import torch

    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if width not in types:
        raise NotImplementedError(f"{_NAME} does not copy elements of {width} bytes")
    return types[width]


def _ordered(original: Callable[..., None], operations: Any) -> Callable[..., None]:
    """LMCache looks for cudaMemcpy in the HIP runtime, which calls it hipMemcpy, and then lets the CPU read or write
    device memory at once, before or after whatever the stream does (lmcache#4870)."""

    def lmcache_memcpy_async(dest: Any, src: Any, nbytes: int, direction: Any, *rest: Any) -> None:
        import torch

        if torch.version.hip is None or not isinstance(dest, int) or not isinstance(src, int):
            original(dest, src, nbytes, direction, *rest)
            return
        device = torch.device("cuda", torch.cuda.current_device())
        copy_in_stream(operations._tensor_from_ptr, dest, src, nbytes, to_device=direction.name == "H2D", device=device)

    return lmcache_memcpy_async


def copy_in_stream(
    from_pointer: FromPointer, dest: int, src: int, nbytes: int, *, to_device: bool, device: Any
) -> None:
    """Copies bytes between host and device in the device's current stream, and waits for them."""
    import torch

    there = from_pointer(dest, (nbytes,), torch.uint8, device if to_device else "cpu")
    here = from_pointer(src, (nbytes,), torch.uint8, "cpu" if to_device else device)
    there.copy_(here)
    effects.count(_NAME, "host_copies")


PATCH = Patch(
    name=_NAME,
    behaviour="J",
    summary=(
        "LMCache 0.4.5 and 0.4.6 have no Python version of the block copy of their MP server: without compiled kernels "
        "every store and load fails, and is only logged. It is added, and LMCache's copies between host and device are "
        "put in the stream's order (lmcache#4870)."
    ),
    issue="lmcache#4870",
    lmcache=">=0.4.5,<0.4.7",
    targets=(
        Target("lmcache.non_cuda_equivalents._tensor_from_ptr", only="<0.4.6"),
        Target("lmcache.non_cuda_equivalents.lmcache_memcpy_async", body=True, only="<0.4.6"),
        Target("lmcache.python_ops_fallback._tensor_from_ptr", only=">=0.4.6,<0.4.7"),
        Target("lmcache.python_ops_fallback.lmcache_memcpy_async", body=True, only=">=0.4.6,<0.4.7"),
    ),
    runs_in=("lmcache-server",),
    platforms=("rocm",),
    settings=frozenset({SWITCH}),
    required=False,
    effects={
        "copies": "copies between an engine's blocks and LMCache's chunks",
        "host_copies": "copies between host and device memory, in the order of the stream",
    },
    remove_when="lmcache 0.4.6 is no longer supported: 0.4.7 has the operation",
    apply=apply,
)
