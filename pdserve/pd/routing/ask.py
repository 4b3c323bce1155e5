"""Name what a policy may look at of a request."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pd.routing.block_hash import SECRET
from pdserve.pd.routing.chain import TOKEN_BYTES, Chain, GrowingChain, pack


class RoutingRequest:
    """One request, as far as routing is concerned."""

    __slots__ = ("begin", "chains", "end", "estimate", "prompt", "prompt_blocks", "root", "session", "tokens")

    def __init__(
        self,
        prompt: bytes,
        begin: int = 0,
        end: int | None = None,
        *,
        tokens: Sequence[int] | None = None,
        estimate: int = 0,
        session: str | None = None,
        root: int = SECRET,
    ) -> None:
        self.prompt = prompt
        """What shapes the prompt, as the client sent it: raw JSON of system, tools, messages, prompt or input. Or the
        body in which that stands."""
        self.begin, self.end = begin, end
        """Where in `prompt` it is; None: up to the end."""
        self.tokens = tokens
        """Exact token ids. None when they are not known, and also when ids alone do not name the KV: a request with a
        cache_salt, images or other media, prompt embeddings, or a LoRA adapter as its model."""
        self.estimate = estimate
        """Prompt tokens: exact, or len(prompt) / 4."""
        self.session = session
        """Value of the affinity header or of the body's `user`."""
        self.root = root
        """Another one for each cache_salt: engines share no KV between prompts of different salts."""
        self.chains: dict[int, Chain] = {}
        """Block hashes of the tokens that policies have worked out already, by block size: those of prefill and of
        decode need the same ones."""
        self.prompt_blocks: GrowingChain | None = None
        """The same of the prompt, of the block size that was asked for last."""

    def set_tokens(self, tokens: Sequence[int] | None) -> None:
        """Exact ids, if they are known: they are counted then, too."""
        if tokens is not None:
            self.tokens, self.estimate = tokens, len(tokens)

    def drop_prompt(self) -> None:
        """No worker is chosen for it any more: what is as large as its prompt leaves memory."""
        self.prompt = b""
        self.begin, self.end = 0, None
        self.tokens = self.prompt_blocks = None
        self.chains = {}

    def prompt_chain(self, block_bytes: int) -> GrowingChain:
        chain = self.prompt_blocks
        if chain is None or chain.size != block_bytes:
            chain = self.prompt_blocks = GrowingChain(self.prompt, block_bytes, self.begin, self.end, self.root)
        return chain

    def token_chain(self, block_tokens: int) -> Chain | None:
        """Return the prompt's blocks by tokens; None: there are none, or ids that no vocabulary has."""
        chain = self.chains.get(block_tokens)
        if chain is None:
            if self.tokens is None:
                return None
            packed = pack(self.tokens)
            if packed is None:
                return None
            chain = self.chains[block_tokens] = Chain(packed, TOKEN_BYTES * block_tokens)
        return chain
