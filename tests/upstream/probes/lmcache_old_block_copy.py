"""The block copy of LMCache's MP server on an lmcache without compiled kernels, on the CPU's own memory.

Arguments: none. Prints whether the operation is there without our patch, what a store does then, and checksums of the
same copies as whatever operation this lmcache has after the patch: ours before 0.4.7, upstream's own from there on.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import torch

from pdserve.patches import effects
from pdserve.patches.lmcache import block_copy

BLOCKS, LAYERS, BLOCK, HEADS, WIDTH = 12, 3, 4, 1, 8
CHUNK = 16
PER_CHUNK = CHUNK // BLOCK


def operations() -> tuple[Any, Any, Any, Any]:
    """The operation (or None), direction, format and descriptor classes of this lmcache."""
    importlib.import_module("lmcache")
    try:
        ops: Any = importlib.import_module("lmcache.c_ops")
    except ModuleNotFoundError:
        ops = importlib.import_module("lmcache.v1.platform.torch_ops.mp_mem_kernels")
        native: Any = importlib.import_module("lmcache.lmcache_native")
        return (
            ops.multi_layer_block_kv_transfer,
            native.TransferDirection,
            native.EngineKVFormat,
            ops.PageBufferShapeDesc,
        )
    found = getattr(ops, "multi_layer_block_kv_transfer", None)
    return found, ops.TransferDirection, ops.GPUKVFormat, ops.PageBufferShapeDesc


def copying_module() -> Any:
    """Where this lmcache has its copy between host and device without compiled kernels."""
    try:
        return importlib.import_module("lmcache.c_ops")
    except ModuleNotFoundError:
        return importlib.import_module("lmcache.v1.platform.torch_ops.mem_kernels")


def described(descriptor: Any, kv_size: int, itemsize: int) -> Any:
    shape = descriptor()
    shape.kv_size, shape.nl, shape.nb, shape.bs = kv_size, LAYERS, BLOCKS, BLOCK
    shape.nh, shape.hs, shape.element_size = HEADS, WIDTH, itemsize
    return shape


def digest(tensors: list[torch.Tensor]) -> list[int]:
    weights = [int((t.view(torch.uint8).flatten().long() * torch.arange(1, t.nbytes + 1)).sum()) for t in tensors]
    return [weight % (1 << 31) for weight in weights]


def transfer(
    operation: Any, direction: Any, layout: Any, kv_size: int, skip: int, seed: int, descriptor: Any
) -> list[int]:
    """A store and a load of two chunks; the bytes of chunks and blocks afterwards."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"NL_X_NB_BS_HS": (BLOCKS, BLOCK, WIDTH), "NL_X_TWO_NB_BS_NH_HS": (2, BLOCKS, BLOCK, HEADS, WIDTH)}
    shape = shapes.get(layout.name, (BLOCKS, 2, BLOCK, HEADS, WIDTH))
    paged = [torch.randn(shape, generator=generator).half() for _ in range(LAYERS)]
    chunk_shape = (LAYERS, CHUNK, WIDTH) if kv_size == 1 else (2, LAYERS, CHUNK, HEADS * WIDTH)
    chunks = [torch.randn(chunk_shape, generator=generator).half() for _ in range(2)]
    ids = random.Random(seed).sample(range(BLOCKS), 2 * PER_CHUNK)
    pointers = torch.tensor([one.data_ptr() for one in paged], dtype=torch.int64)
    operation(
        pointers,
        [one.data_ptr() for one in chunks],
        torch.tensor(ids, dtype=torch.long),
        torch.device("cpu"),
        direction,
        described(descriptor, kv_size, 2),
        CHUNK,
        layout,
        skip,
    )
    return digest([*paged, *chunks])


def copies(operation: Any, directions: Any, formats: Any, descriptor: Any) -> dict[str, list[int]]:
    layouts = (("NL_X_NB_BS_HS", 1), ("NL_X_TWO_NB_BS_NH_HS", 2), ("NL_X_NB_TWO_BS_NH_HS", 2))
    return {
        f"{direction} {layout} skip {skip}": transfer(
            operation, getattr(directions, direction), getattr(formats, layout), kv_size, skip, seed, descriptor
        )
        for seed, ((layout, kv_size), direction, skip) in enumerate(
            itertools.product(layouts, ("D2H", "H2D"), range(2 * PER_CHUNK + 1))
        )
    }


def cpu_reads_device_memory(ops: Any, direction: Any) -> bool:
    """Whether a copy from a device address is done by the CPU where the runtime is HIP, whose library has no
    cudaMemcpy. The CPU's copy itself is replaced by a note: there is no such address here."""
    touched: list[int] = []
    with contextlib.ExitStack() as stack:
        for name, stand_in in (
            ("_get_copy_lib", lambda: SimpleNamespace(hipMemcpy=None)),
            ("_copy_bytes_with_tensor", lambda dest, src, nbytes: touched.append(nbytes)),
        ):
            stack.callback(setattr, ops, name, getattr(ops, name))
            setattr(ops, name, stand_in)
        ops.lmcache_memcpy_async(1 << 40, 2 << 40, 64, direction, 0, 4096)
    return touched == [64]


def padded_round_trip(from_pointer: Any, descriptor: Any, directions: Any, formats: Any) -> dict[str, bool]:
    """MLA blocks in a pool whose rows are wider than a block: a store, and a load into another such pool."""
    operation = block_copy.block_copy(from_pointer, 2)
    width = BLOCK * WIDTH
    pools = [torch.full((BLOCKS, width + 24), float(fill)).bfloat16() for fill in (1, 2)]
    pools[0][:, :width] = torch.randn(BLOCKS, width).bfloat16()
    chunk = torch.zeros(1, CHUNK, WIDTH).bfloat16()
    shape = described(descriptor, 1, 0)
    shape.block_stride_elems = width + 24
    ids = [7, 0, 11, 3]
    for pool, direction in zip(pools, (directions.D2H, directions.H2D), strict=True):
        pointers = ([pool.data_ptr()], [chunk.data_ptr()])
        operation(*pointers, ids, torch.device("cpu"), direction, shape, CHUNK, formats.NL_X_NB_BS_HS)
    others = [block for block in range(BLOCKS) if block not in ids]
    return {
        "moved": bool((pools[1][ids, :width] == pools[0][ids, :width]).all()),
        "others untouched": bool((pools[1][others] == 2).all()),
        "padding untouched": bool((pools[1][:, width:] == 2).all()),
    }


def refusals(operation: Any, directions: Any, formats: Any, descriptor: Any) -> dict[str, str]:
    found = {}
    for name, layout, kv_size, chunk, itemsize in (
        ("heads first", "NL_X_TWO_NB_NH_BS_HS", 2, CHUNK, 2),
        ("MLA with two planes", "NL_X_NB_BS_HS", 2, CHUNK, 2),
        ("uneven chunk", "NL_X_NB_BS_HS", 1, CHUNK + 1, 2),
        ("odd width", "NL_X_NB_BS_HS", 1, CHUNK, 3),
    ):
        shape = described(descriptor, kv_size, itemsize)
        room = torch.zeros(1 << 16, dtype=torch.uint8)
        arguments = ([room.data_ptr()], [room.data_ptr()], torch.zeros(1, dtype=torch.long), torch.device("cpu"))
        try:
            operation(*arguments, directions.D2H, shape, chunk, getattr(formats, layout), 0)
        except (NotImplementedError, ValueError) as error:
            found[name] = type(error).__name__
    return found


def on_hip(ops: Any, direction: Any) -> dict[str, Any]:
    """Our host copy where torch is built for HIP: which views it makes (the CPU stands in for the device), and
    whether the bytes arrive."""
    torch.version.hip = "7.2"
    torch.cuda.current_device = lambda: 0
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    original, asked = ops._tensor_from_ptr, []

    def from_pointer(pointer: int, shape: Any, dtype: Any, device: Any) -> Any:
        asked.append(str(device))
        return original(pointer, shape, dtype, "cpu")

    ops._tensor_from_ptr = from_pointer
    ops.lmcache_memcpy_async(target.data_ptr(), source.data_ptr(), 64, direction, 0, 4096)
    return {"views": asked, "copied": bool((source == target).all())}


def main() -> None:
    before, directions, formats, descriptor = operations()
    answer: dict[str, Any] = {"there_without": before is not None}
    ops = copying_module()
    answer["cpu_reads_device_memory"] = cpu_reads_device_memory(ops, directions.D2H)
    if before is None:
        block_copy.PATCH.apply()
        block_copy.PATCH.apply()
    operation, *_ = operations()
    answer["copies"] = copies(operation, directions, formats, descriptor)
    if before is None:
        answer["counted"] = effects.totals()["lmcache-block-copy", "copies"] == len(answer["copies"])
        answer["refused"] = refusals(operation, directions, formats, descriptor)
        answer["padded"] = padded_round_trip(ops._tensor_from_ptr, descriptor, directions, formats)
        answer["original_without_hip"] = cpu_reads_device_memory(ops, directions.D2H)
        answer["on_hip"] = on_hip(ops, directions.D2H)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
