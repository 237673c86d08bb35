"""Models that must be refused: recurrent, hybrid, encoder-decoder, with token types, without a cache or a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from tiny import DECODER, GPT2, HIDDEN, LAYERS, MOE, VOCAB, WINDOW, decoder, other, tiny


@dataclass(frozen=True)
class Refused:
    """One architecture that must be refused; the message holds one of `reasons` (compared in lower case)."""

    name: str
    build: Callable[[], PreTrainedModel]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


_SSM = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "state_size": 8, "num_hidden_layers": LAYERS}


def gemma3_vision() -> PreTrainedModel:
    """Gemma 3 with its image tower: attention among image tokens is bidirectional, told by token types."""
    text = {**DECODER, "head_dim": 16, "sliding_window": 20}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return tiny(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
    )


REFUSED: tuple[Refused, ...] = (
    Refused("mamba", other("MambaForCausalLM", "MambaConfig", **_SSM), ("mamba", "recurrent", "state")),
    Refused(
        "jamba",
        decoder(
            "Jamba",
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        ("mamba", "linear_attention"),
    ),
    Refused(
        "qwen3-next",
        decoder(
            "Qwen3Next",
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=32,
            **MOE,
        ),
        ("linear_attention",),
    ),
    Refused("lfm2", decoder("Lfm2", layer_types=["conv", "full_attention"]), ("conv",)),
    Refused(
        "recurrent-gemma",
        decoder(
            "RecurrentGemma",
            num_key_value_heads=1,
            head_dim=12,
            lru_width=HIDDEN,
            attention_window_size=WINDOW,
            num_hidden_layers=3,
        ),
        ("recurrent",),
    ),
    Refused(
        "t5",
        other(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=12,
            d_ff=80,
            num_layers=LAYERS,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        ("encoder-decoder",),
    ),
    Refused(
        "bert-encoder",
        other(
            "BertLMHeadModel",
            "BertConfig",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            is_decoder=False,
        ),
        ("bidirectional", "causal", "is_decoder"),
    ),
    Refused(
        "gemma3-bidirectional",
        decoder("Gemma3", config="Gemma3TextConfig", head_dim=16, use_bidirectional_attention=True, sliding_window=20),
        ("bidirectional", "causal"),
    ),
    Refused("gemma3-vision", gemma3_vision, ("vision", "token type")),
    Refused(
        "llama-classifier",
        decoder("Llama", model="LlamaForSequenceClassification", num_labels=3),
        ("causal", "language model", "logits", "head"),
    ),
    Refused(
        "prophetnet-decoder",
        other(
            "ProphetNetForCausalLM",
            "ProphetNetConfig",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_decoder_layers=LAYERS,
            num_decoder_attention_heads=4,
            decoder_ffn_dim=80,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
        ("cache", "prefix"),
    ),
    Refused(
        "openai-gpt",
        other("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", **GPT2),
        ("cache", "past_key_values"),
    ),
)
