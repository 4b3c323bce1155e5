"""pdserve: one YAML recipe to a proven prefill/decode-disaggregated vLLM deployment.

Importing the package imports no engine: vllm, lmcache and mooncake live in the processes that we start.
"""

__version__ = "0.1.0"
