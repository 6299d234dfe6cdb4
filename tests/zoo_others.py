"""More tiny models, each for something that the zoo has not; they run as pretend ranks only.

`MODELS[name](layers)` gives (model, kwargs); `REFUSED` has the models that no graph can keep, or not
in training, with what the error says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests import zoo
from tests.zoo import BATCH, GQA, MOE, SEQ, VOCAB, decoder, ids

Make = Callable[[int], tuple[nn.Module, dict[str, Any]]]


def build(name: str, seed: int = 0) -> zoo.Built:
    torch.manual_seed(seed)
    model, kwargs = (MODELS | REFUSED_MODELS)[name](2)
    return zoo.randomise(model).eval(), (), kwargs


def _of(kind: str, cls: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Make:
    def make(layers: int) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **options)
        return getattr(transformers, cls)._from_config(config), inputs()

    return make


def _with_experts(implementation: str, make: Make) -> Make:
    def changed(layers: int) -> tuple[nn.Module, dict[str, Any]]:
        model, kwargs = make(layers)
        model.set_experts_implementation(implementation)  # type: ignore[operator]
        return model, kwargs

    return changed


def _text() -> dict[str, Any]:
    return {"input_ids": ids()}


def _image(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _speech() -> dict[str, Any]:
    features = torch.randn(BATCH, 8, 2 * SEQ)
    return {"input_features": features, "decoder_input_ids": ids(length=7), "use_cache": False}


EVEN = GQA | {"hidden_size": 24}
EXPERTS = MOE | {"hidden_size": 24}
ENCODER = dict(
    vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, num_attention_heads=6,
    intermediate_size=52, max_position_embeddings=40,
)  # fmt: skip
TWO_STACKS = dict(
    vocab_size=VOCAB, d_model=30, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
    decoder_attention_heads=5, encoder_ffn_dim=52, decoder_ffn_dim=44, pad_token_id=0,
    bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip
LATENT = dict(
    hidden_size=24, intermediate_size=44, moe_intermediate_size=20, num_attention_heads=6,
    num_key_value_heads=6, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
    q_lora_rank=12, kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5,
    max_position_embeddings=64,
)  # fmt: skip
SPEECH_CONVS = dict(
    conv_dim=(12, 12, 14), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
    num_feat_extract_layers=3, num_conv_pos_embeddings=5, num_conv_pos_embedding_groups=3,
)  # fmt: skip

MODELS: dict[str, Make] = {
    # attention and the MLP side by side, norms over heads, rotary pairs that alternate
    "cohere": decoder("cohere", use_qk_norm=True, **EVEN),
    # ALiBi, and q, k, v packed head by head
    "bloom": decoder("bloom", hidden_size=30, n_head=5, n_layer=2),
    # q, v, k packed in blocks of heads
    "codegen": decoder("codegen", n_embd=32, n_head=4, n_layer=2, n_inner=52, rotary_dim=4, n_positions=64, n_ctx=64),
    # one key/value head packed behind all query heads
    "gpt_bigcode": decoder("gpt_bigcode", n_embd=30, n_head=5, n_layer=2, n_inner=52, n_positions=64),
    # tanh on scores and logits, norms before and after
    "gemma2": decoder("gemma2", head_dim=6, sliding_window=5, query_pre_attn_scalar=6, **(GQA | {"num_key_value_heads": 2})),
    # a norm of each head of its own, a rotary part of a head
    "stablelm": decoder("stablelm", qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5, **EVEN),
    # squared relu and norms around one
    "nemotron": decoder("nemotron", **EVEN),
    # latent keys and values, experts chosen by groups
    "deepseek_v3": decoder("deepseek_v3", n_routed_experts=6, n_group=3, topk_group=2, **LATENT),
    # sinks, experts with biases, gate and up interleaved
    "gpt_oss": decoder("gpt_oss", head_dim=6, num_local_experts=5, num_experts_per_tok=2, sliding_window=5, **MOE),
    # experts beside one that all tokens see
    "qwen2_moe": decoder("qwen2_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=36, **EXPERTS),
    # each token's own copy of its experts
    "granitemoe": _with_experts("batched_mm", decoder("granitemoe", num_local_experts=5, num_experts_per_tok=2, **EXPERTS)),
    # a scan over the sequence
    "mamba": decoder("mamba", hidden_size=12, state_size=5, num_layers=2, expand=2, conv_kernel=3, time_step_rank=3),
    # gated convolutions between attentions
    "lfm2": decoder("lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, **EVEN),
    # one layer used twice, a factorised embedding
    "albert": _of("albert", "AlbertForMaskedLM", _text, embedding_size=14, **ENCODER),
    # scores by content and position, gathered
    "deberta_v2": _of("deberta-v2", "DebertaV2ForMaskedLM", _text, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", **ENCODER),
    # scores shifted by a reshape
    "xlnet": _of("xlnet", "XLNetLMHeadModel", lambda: {"input_ids": ids(), "use_mems": False}, vocab_size=VOCAB, d_model=30, n_layer=2, n_head=5, d_inner=52),
    # Fourier instead of attention
    "fnet": _of("fnet", "FNetForMaskedLM", _text, vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, intermediate_size=52, max_position_embeddings=29),
    # strided convolutions before a stack, another number of heads behind
    "whisper": _of("whisper", "WhisperForConditionalGeneration", _speech, num_mel_bins=8, max_source_positions=SEQ, max_target_positions=29, **TWO_STACKS),
    # grouped convolutions with weight norm
    "wav2vec2": _of("wav2vec2", "Wav2Vec2Model", lambda: {"input_values": torch.randn(BATCH, 600)}, **(ENCODER | {"num_attention_heads": 5}), **SPEECH_CONVS),
    # two towers of other widths, and their products
    "clip": _of(
        "clip", "CLIPModel", lambda: {**_text(), **_image(20)()}, projection_dim=18,
        text_config=dict(ENCODER, num_attention_heads=5, projection_dim=18, bos_token_id=0, eos_token_id=1, pad_token_id=0),
        vision_config=dict(hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6, image_size=20, patch_size=4, projection_dim=18),
    ),
    # windows that are rolled, patches that are merged
    "swin": _of("swin", "SwinForImageClassification", _image(32), image_size=32, patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[2, 3], window_size=4, num_labels=7),
    # depthwise convolutions, norms over channels first
    "convnext": _of("convnext", "ConvNextForImageClassification", _image(32), hidden_sizes=[10, 14, 18, 22], depths=[1, 1, 2, 1], num_labels=7),
    # batch norms that have learned, pooling
    "resnet": _of("resnet", "ResNetForImageClassification", _image(32), embedding_size=10, hidden_sizes=[12, 20, 28, 36], depths=[1, 1, 1, 1], num_labels=7),
    # a square root whose backward the model writes itself
    "recurrent_gemma": decoder("recurrent_gemma", head_dim=6, lru_width=30, attention_window_size=5, **(GQA | {"num_key_value_heads": 1})),
    "longformer": _of("longformer", "LongformerModel", _text, attention_window=4, **ENCODER),
}  # fmt: skip
NAMES = tuple(MODELS)

REFUSED_MODELS: dict[str, Make] = {
    "olmoe": _with_experts("eager", decoder("olmoe", num_experts=5, num_experts_per_tok=2, **EXPERTS)),
    "dbrx": decoder(
        "dbrx", d_model=24, n_heads=6, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 28, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 24},
    ),
    "rwkv": decoder("rwkv", hidden_size=12, attention_hidden_size=12, intermediate_size=20, context_length=64),
}  # fmt: skip
REFUSED = {
    "olmoe": "for expert_idx in expert_hit:`: what runs depends on the value",
    "dbrx": "for expert_idx in expert_hit:`: what runs depends on the value",
    "rwkv": "changes in place: the parameter rwkv.blocks.0.attention.output.weight",
}
