"""Small models for tests: one per family, every weight away from its default, as folders that transformers wrote."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (class, keys of its config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_theta": 500000.0, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama3.1": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False}),
    "llama3.2": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0, "tie_word_embeddings": True}),
    "qwen2.5-yarn": (
        "Qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1000000.0}),
    "smollm2": ("Llama", {"num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
}


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """A transformers model of the family with random weights, norms and biases among them."""
    kind, keys = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | keys | more))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def save(model: Any, folder: Path, **more: Any) -> Path:
    model.save_pretrained(folder, safe_serialization=True, **more)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """Put a tokenizer.json with 256 ids into the folder: one token a byte, numbered by their characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def relative(found: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-300) -> float:
    """Relative Frobenius distance; `floor` is the norm below which a wanted tensor is rounding alone."""
    return ((found - wanted).norm() / wanted.norm().clamp(min=floor)).item()
