"""What vLLM's configuration classes make of a planned command, for real_parsers.py.

Built are CacheConfig, ParallelConfig, SchedulerConfig, CompilationConfig and KVTransferConfig, the connector's class,
and the parsers of tools and reasoning. Not built, because that takes more than a command line: ModelConfig (config.json
of the model), SpeculativeConfig (that of the draft model too) and VllmConfig, in which the device's platform checks
them together and chooses the attention backend.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser


def configure(arguments: list[str]) -> dict[str, Any]:
    """What vLLM makes of the command line of one engine."""
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    cache = CacheConfig(
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=bool(args.enable_prefix_caching),
    )
    parallel = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        prefill_context_parallel_size=args.prefill_context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        data_parallel_size_local=args.data_parallel_size_local or 1,
        data_parallel_rank=args.data_parallel_rank or args.data_parallel_start_rank or 0,
        data_parallel_external_lb=args.data_parallel_external_lb,
        data_parallel_hybrid_lb=args.data_parallel_hybrid_lb,
        all2all_backend=args.all2all_backend,
        enable_expert_parallel=args.enable_expert_parallel,
        distributed_executor_backend="mp",
    )
    scheduler = SchedulerConfig(
        max_model_len=args.max_model_len or 4096,
        max_num_seqs=args.max_num_seqs or 256,
        max_num_batched_tokens=args.max_num_batched_tokens or args.max_model_len or 4096,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    transfer = args.kv_transfer_config
    return {
        "block_size": cache.block_size,
        "cache_dtype": cache.cache_dtype,
        "world_size": parallel.world_size_across_dp,
        "rank": parallel.data_parallel_rank,
        "own_ranks_only": parallel.local_engines_only,
        "max_num_seqs": scheduler.max_num_seqs,
        "cudagraph_mode": getattr(args.compilation_config.cudagraph_mode, "name", None),
        "connector": transfer and KVConnectorFactory.get_connector_class(transfer).__module__,
        "kv_role": transfer and transfer.kv_role,
        "tool_parser": parsed.tool_call_parser and ToolParserManager.get_tool_parser(parsed.tool_call_parser).__name__,
        "reasoning_parser": args.reasoning_parser
        and ReasoningParserManager.get_reasoning_parser(args.reasoning_parser).__name__,
    }
