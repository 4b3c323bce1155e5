"""The model: its folder or id, its files, and what vLLM can do with it."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import Rule, rule

MODEL: tuple[Rule, ...] = (
    rule(
        r"Repo id must (?:use|be)[^\n]*: '(?P<path>[^']+)'",
        "the model folder {path} does not exist on this host",
        "correct model.path (the tiny model: ./scripts/tiny-model)",
    ),
    rule(r"^weights: failed: (?P<why>.+?) -> (?P<todo>.+)", "{why}", "{todo}", frozenset({"weights"})),
    rule(
        r"Invalid repository ID or local directory specified: '(?P<path>[^']+)'",
        "{path} is no model: no such folder, or no config.json in it",
        "correct model.path, or finish the download",
    ),
    rule(
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|couldn't connect to 'https://huggingface",
        "the model is not in the local cache, and the hub is offline or not allowed (HF_HUB_OFFLINE)",
        "download it first (hf download), use model.path, or allow the hub",
    ),
    rule(
        r"GatedRepoError|gated repo|RepositoryNotFoundError|401 Client Error",
        "the hub does not give out this model: a wrong id, or a gated one without a token",
        "correct model.id, or put HF_TOKEN: {{secret: HF_TOKEN}} into engine.env",
    ),
    rule(
        r"Cannot find any model weights with `(?P<path>[^`]+)`",
        "{path} has a config but no weights",
        "finish the download, or correct model.path",
    ),
    rule(
        r"SafetensorError: (?P<why>.+)",
        "a weight file is damaged or incomplete: {why}",
        "download or generate the model again",
    ),
    rule(
        # With its backticks: vLLM also dumps whole configurations, in which it is a setting.
        r"(?:pass the argument|set the option|consider setting) `trust_remote_code=True`",
        "the model brings its own code, which vLLM runs only with --trust-remote-code",
        "if you trust it: trust-remote-code: true in engine.args",
    ),
    rule(
        r"Model architectures (?P<names>\[[^\]]+\]) (?:are not supported|failed to be inspected)",
        "this vllm does not support the architecture {names}",
        "use a vllm that does, or another model",
    ),
    rule(
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \(\w+=(?P<most>\d+)",
        "max-model-len {asked} is more than the model's {most}",
        "lower max-model-len in {args}",
    ),
)
