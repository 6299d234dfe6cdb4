"""Tiny models with random weights, every parameter with noise, sizes odd and distinct.

`build(name)` gives (model, args, kwargs); `NAMES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB, BATCH, SEQ = 47, 2, 11

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def build(name: str, *, layers: int = 2, seed: int = 0) -> Built:
    """The model in eval mode, and example inputs."""
    torch.manual_seed(seed)
    model, kwargs = MODELS[name](layers)
    return randomise(model).eval(), (), kwargs


def randomise(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Noise on every parameter: a zero bias or a norm weight of ones would hide faults."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


def ids(rows: int = BATCH, length: int = SEQ) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, length))


def decoder(kind: str, **options: Any) -> Callable[[int], tuple[nn.Module, dict[str, Any]]]:
    def make(layers: int) -> tuple[nn.Module, dict[str, Any]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        common = dict(vocab_size=VOCAB, use_cache=False, bos_token_id=0, eos_token_id=1, pad_token_id=0)
        if kind not in ("gpt2",):
            common["num_hidden_layers"] = layers
        else:
            common["n_layer"] = layers
        config = AutoConfig.for_model(kind, **(common | options))
        return AutoModelForCausalLM.from_config(config), {"input_ids": ids(), "use_cache": False}

    return make


def _bert(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=30, num_hidden_layers=layers, num_attention_heads=6,
        intermediate_size=52, max_position_embeddings=29,
    )
    return BertModel(config), {"input_ids": ids()}


def _vit(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=30, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=52,
        image_size=20, patch_size=4, num_channels=3, num_labels=7,
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(BATCH, 3, 20, 20)}


def _t5(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=30, d_kv=5, d_ff=52, num_layers=layers, num_heads=6,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    return model, {"input_ids": ids(), "decoder_input_ids": ids(length=7), "use_cache": False}


GQA = dict(
    hidden_size=30, intermediate_size=52, num_attention_heads=6, num_key_value_heads=3,
    max_position_embeddings=64,
)
MOE = GQA | {"hidden_size": 28, "intermediate_size": 44}  # grouped_mm: rows of 16 bytes
MHA = dict(hidden_size=30, num_attention_heads=5, max_position_embeddings=64)

MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": decoder("llama", **(GQA | {"hidden_size": 24})),
    "qwen2": decoder("qwen2", **(GQA | {"hidden_size": 24})),
    "qwen3": decoder("qwen3", head_dim=6, **GQA),
    "mistral": decoder("mistral", head_dim=6, sliding_window=5, **GQA),
    "phi3": decoder("phi3", **(GQA | {"hidden_size": 24})),
    "olmo2": decoder("olmo2", **(GQA | {"hidden_size": 24})),
    "gpt2": decoder("gpt2", n_embd=30, n_head=5, n_inner=52, n_positions=64),
    "gptneox": decoder("gpt_neox", intermediate_size=52, rotary_pct=0.5, **(MHA | {"hidden_size": 40})),
    "opt": decoder("opt", ffn_dim=52, word_embed_proj_dim=30, **MHA),
    "falcon": decoder("falcon", **(MHA | {"hidden_size": 30})),
    "gemma3": decoder("gemma3_text", head_dim=6, sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=6,
                       **(GQA | {"num_key_value_heads": 2})),
    "mixtral": decoder("mixtral", head_dim=6, num_local_experts=5, num_experts_per_tok=2, sliding_window=None, **MOE),
    "qwen3moe": decoder("qwen3_moe", head_dim=6, num_experts=5, num_experts_per_tok=2,
                         moe_intermediate_size=20, **MOE),
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}
NAMES = tuple(MODELS)
