"""Writes a tiny Llama with seeded random weights: same bytes every time, no download, about 5 MB (4 layers).

Random, not dummy: with vLLM's dummy weights the logits hardly depend on the context and KV that is lost or wrong
would not show. The answers are pseudo-words; every byte can be read, only syllables and ASCII are ever the most likely.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DEFAULT = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
MANIFEST = "manifest.json"
SEED = 20261
WEIGHT_STD = 0.15
"""Large enough for attention to choose: a changed token of the prompt changes the output."""

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 256, 4, 4, 2, 64, 512, 512
SPECIAL = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def tokenizer() -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer, and the ids that may be the most likely next token.

    Text is always read byte by byte (there are no merges); the syllables are there to be written.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    for name in SPECIAL:
        vocabulary[name] = len(vocabulary)
    syllables = (
        f"{space}{c}{v}{e}" for space in ("", "Ġ") for e in ("", "n") for c in "bdfgklmnprstvz" for v in "aeiou"
    )
    while len(vocabulary) < VOCABULARY:
        vocabulary.setdefault(next(syllables), len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    likely = [
        i
        for token, i in vocabulary.items()
        if token not in SPECIAL and all(32 < ord(c) < 127 or c == "Ġ" for c in token)
    ]
    return made, likely


def tensors(likely: list[int], layers: int = LAYERS) -> dict[str, npt.NDArray[np.float32]]:
    """The weights by their Hugging Face names. Uniform from the raw bits of PCG64, whose stream numpy guarantees."""
    bits = np.random.PCG64(SEED)
    half_width = WEIGHT_STD * math.sqrt(3)

    def random(*shape: int) -> npt.NDArray[np.float32]:
        raw = (bits.random_raw(math.prod(shape)) >> np.uint64(40)).astype(np.float32)
        return ((raw / np.float32(1 << 23) - np.float32(1)) * np.float32(half_width)).reshape(shape)

    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones
        weights[f"{prefix}.self_attn.q_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.k_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.v_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{prefix}.mlp.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
    head = random(VOCABULARY, HIDDEN)
    head[[i for i in range(VOCABULARY) if i not in set(likely)]] = 0
    return {**weights, "lm_head.weight": head}


def files(layers: int = LAYERS) -> dict[str, bytes]:
    """Every file of the model folder."""
    # Here, because it takes seconds, and most calls find the folder complete.
    import torch
    from safetensors.torch import save

    made, likely = tokenizer()
    ids = {name: made.token_to_id(name) for name in SPECIAL}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "pad_token_id": ids["<pad>"],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "tokenizer.json": made.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(tokenizer_config, indent=2) + "\n").encode(),
        "model.safetensors": save(
            {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in tensors(likely, layers).items()},
            {"format": "pt"},
        ),
    }


def complete(folder: Path, script: str) -> bool:
    """Whether `folder` holds what this version of the script wrote, byte for byte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["script"] == script and all(
            digest((folder / name).read_bytes()) == expected for name, expected in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(folder: Path, script: str, layers: int = LAYERS) -> None:
    """Builds the folder beside its place and renames it: an engine never sees half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        built = Path(scratch) / "new"
        built.mkdir()
        made = files(layers)
        for name, content in made.items():
            (built / name).write_bytes(content)
        manifest = {"script": script, "files": {name: digest(content) for name, content in made.items()}}
        (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        built.rename(folder)
    shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT, help="default: .cache/tiny-model")
    parser.add_argument("--layers", type=int, default=LAYERS, help="more cost more to compute; default: %(default)s")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    script = digest(Path(__file__).read_bytes() + str(arguments.layers).encode())
    if not complete(folder, script):
        write(folder, script, arguments.layers)
        print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
