"""One instance alone: what the same prompt gives without the proxy, without transfer, without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import VerifyError
from pdserve.verify.completion import Completion, PossibleToken
from pdserve.verify.target import Target


@dataclass(frozen=True)
class Forced:
    """The reference's view of given output tokens: its logprob of each, and of the token it likes best there."""

    chosen: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def greedy_gap(self) -> float:
        """How much better than the given tokens the reference's own choices are; 0: it would choose the same."""
        return max((best - chosen for best, chosen in zip(self.best, self.chosen, strict=True)), default=0.0)


async def generate(target: Target, prompt: tuple[int, ...], leg: str) -> Completion:
    """What the reference answers by itself. Raises VerifyError if a cache helped it."""
    answer = await target.complete(
        target.reference.url, prompt, salt=target.salt(leg), max_tokens=target.plan.verify.output_tokens
    )
    _computed_all(target, answer)
    return answer


async def force(target: Target, prompt: tuple[int, ...], tokens: Sequence[int], leg: str) -> Forced:
    """The reference reads `prompt` and then `tokens`, instead of choosing its own."""
    answer = await target.complete(
        target.reference.url, prompt + tuple(tokens), salt=target.salt(leg), max_tokens=1, prompt_logprobs=1
    )
    _computed_all(target, answer)
    entries = answer.prompt_logprobs[len(prompt) :]
    if len(entries) != len(tokens):
        raise VerifyError("the reference returned no logprobs of its prompt", where=target.reference.url)
    return Forced(
        chosen=tuple(_logprob(target, entry, token) for entry, token in zip(entries, tokens, strict=True)),
        best=tuple(max(candidate.logprob for candidate in (entry or {}).values()) for entry in entries),
    )


def _logprob(target: Target, entry: dict[str, PossibleToken] | None, token: int) -> float:
    candidate = (entry or {}).get(str(token))
    if candidate is None:
        raise VerifyError(f"the reference returned no logprob of token {token}", where=target.reference.url)
    return candidate.logprob


def _computed_all(target: Target, answer: Completion) -> None:
    # Covers the engine's own prefix cache and LMCache alike: vLLM counts tokens from a connector as cached.
    if answer.cached_tokens:
        raise VerifyError(
            f"the reference took {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens from a cache",
            where=target.reference.url,
            cause="a request under a new cache_salt found KV: the engine or LMCache ignores the salt",
            todo=f"look at {target.log(target.reference.name)}; comparing cache with cache would prove nothing",
        )
