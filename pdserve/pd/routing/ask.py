"""What a policy may look at of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.pd.routing.chain import TOKEN_BYTES, Chain, GrowingChain, pack


@dataclass(slots=True)
class RoutingRequest:
    """One request, as far as routing is concerned."""

    prompt: bytes
    """What shapes the prompt, as the client sent it: raw JSON of system, tools, messages, prompt or input. Or the body
    in which that stands."""
    begin: int = 0
    end: int | None = None
    """Where in `prompt` it is; None: up to the end."""
    tokens: Sequence[int] | None = None
    """Exact token ids. None when they are not known, and also when ids alone do not name the KV: a request with a
    cache_salt, images or other media, prompt embeddings, or a LoRA adapter as its model."""
    estimate: int = 0
    """Prompt tokens: exact, or len(prompt) / 4."""
    session: str | None = None
    """Value of the affinity header or of the body's `user`."""
    chains: dict[int, Chain] = field(default_factory=dict, compare=False, repr=False)
    """Block hashes of the tokens that policies have worked out already, by block size: those of prefill and of decode
    need the same ones."""
    prompt_blocks: GrowingChain | None = field(default=None, compare=False, repr=False)
    """The same of the prompt, of the block size that was asked for last."""

    def prompt_chain(self, block_bytes: int) -> GrowingChain:
        chain = self.prompt_blocks
        if chain is None or chain.size != block_bytes:
            chain = self.prompt_blocks = GrowingChain(self.prompt, block_bytes, self.begin, self.end)
        return chain

    def token_chain(self, block_tokens: int) -> Chain | None:
        """None without tokens, or with ids that no vocabulary has."""
        chain = self.chains.get(block_tokens)
        if chain is None:
            if self.tokens is None:
                return None
            packed = pack(self.tokens)
            if packed is None:
                return None
            chain = self.chains[block_tokens] = Chain(packed, TOKEN_BYTES * block_tokens)
        return chain
