"""Presets: the config.json of public models, to be trained from random weights.

`tiny` is our own: 2.9 million parameters and a vocabulary of bytes, small enough to learn on two CPU cores.
"""

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(
    family: str,
    vocab: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    theta: float,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5 if family == "llama" else 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **more,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config(
        "llama", 49152, 576, 1536, 30, 9, 3, theta=100000.0, context=8192, tie_word_embeddings=True
    ),
    "llama2-7b": _config("llama", 32000, 4096, 11008, 32, 32, 32, theta=10000.0, context=4096),
    "llama3-8b": _config("llama", 128256, 4096, 14336, 32, 32, 8, theta=500000.0, context=8192),
    "llama3-70b": _config("llama", 128256, 8192, 28672, 80, 64, 8, theta=500000.0, context=8192),
    "llama3.2-1b": _config(
        "llama",
        128256,
        2048,
        8192,
        16,
        32,
        8,
        theta=500000.0,
        context=131072,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3_ROPE,
    ),
    "llama3.2-3b": _config(
        "llama",
        128256,
        3072,
        8192,
        28,
        24,
        8,
        theta=500000.0,
        context=131072,
        head_dim=128,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3_ROPE,
    ),
    "qwen3-8b": _config("qwen3", 151936, 4096, 12288, 36, 32, 8, theta=1000000.0, context=40960, head_dim=128),
    "qwen3-32b": _config("qwen3", 151936, 5120, 25600, 64, 64, 8, theta=1000000.0, context=40960, head_dim=128),
    # For the data `needles`. So narrow a model learns faster from larger random weights
    "needles": _config(
        "llama",
        128,
        64,
        192,
        2,
        2,
        2,
        theta=100000.0,
        context=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
    ),
    # For examples/longer: the same tokens, and a rope for 256K
    "needles-28m": _config(
        "llama",
        1024,
        512,
        1408,
        10,
        4,
        2,
        theta=1e7,
        context=262144,
        head_dim=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
    ),
    "tiny": _config("llama", 256, 256, 704, 4, 8, 2, theta=100000.0, context=65536, tie_word_embeddings=True),
}
