"""Configurations of a few thousand parameters, by the name of the class of the model."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CAUSAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _GROUPED,
    "GPT2LMHeadModel": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        **_SPECIAL,
    },
    "GPTNeoXForCausalLM": _SIZES,
    "OPTForCausalLM": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "FalconForCausalLM": {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_SPECIAL},
    "PhiForCausalLM": _SIZES,
    "GemmaForCausalLM": _GROUPED,
    "Gemma2ForCausalLM": {**_GROUPED, "sliding_window": 8},
    "Gemma3ForCausalLM": {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "MistralForCausalLM": {**_GROUPED, "sliding_window": 8},
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": _GROUPED,
    "Olmo2ForCausalLM": _GROUPED,
    "CohereForCausalLM": _GROUPED,
    "MixtralForCausalLM": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {**_GROUPED, **_EXPERTS},
    "GptOssForCausalLM": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "DeepseekV3ForCausalLM": {
        **_SIZES,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Qwen3NextForCausalLM": {
        **_GROUPED,
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "MambaForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "use_cache": False,
        **_SPECIAL,
    },
    "Mamba2ForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "num_hidden_layers": 2,
        "use_cache": False,
        **_SPECIAL,
    },
}

MASKED: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _SIZES,
    "RobertaForMaskedLM": _SIZES,
    "ElectraForMaskedLM": {**_SIZES, "embedding_size": 16},
    "AlbertForMaskedLM": {**_SIZES, "embedding_size": 16},
    "DistilBertForMaskedLM": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
    "DebertaV2ForMaskedLM": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBertForMaskedLM": {**_SIZES, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
}

_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}
SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": _T5,
    "SwitchTransformersForConditionalGeneration": {
        **_T5,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "BartForConditionalGeneration": _BART,
    "M2M100ForConditionalGeneration": _BART,
}

_IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_CLASSES = {"num_labels": 4}
_SOUND = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    **_SPECIAL,
}
# The name of the inputs, and the configuration.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("image", {**_IMAGE, **_CLASSES}),
    "BeitForImageClassification": ("image", {**_IMAGE, **_CLASSES, "use_relative_position_bias": True}),
    "Dinov2ForImageClassification": ("image", {**_IMAGE, **_CLASSES}),
    "SwinForImageClassification": (
        "image",
        {
            **_CLASSES,
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "ConvNextForImageClassification": (
        "image",
        {**_CLASSES, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 32},
    ),
    "SegformerForSemanticSegmentation": (
        "segmented",
        {
            **_CLASSES,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "DetrForObjectDetection": (
        "detected",
        {
            **_CLASSES,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
        },
    ),
    "SamModel": (
        "prompted",
        {
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
                "mlp_dim": 48,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {
                "hidden_size": 16,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        },
    ),
    "WhisperForConditionalGeneration": (
        "spectrum",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
    ),
    "Wav2Vec2ForCTC": ("sound", _SOUND),
    "HubertForCTC": ("sound", _SOUND),
    "CLIPModel": (
        "image_and_text",
        {"text_config": _SIZES, "vision_config": _IMAGE, "projection_dim": 16},
    ),
    "SiglipModel": ("image_and_text", {"text_config": _SIZES, "vision_config": _IMAGE}),
    "LlavaForConditionalGeneration": (
        "images_in_text",
        {
            "text_config": {"model_type": "llama", **_GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **_IMAGE, "patch_size": 16},
            "image_token_id": 3,
            "vision_feature_layer": -1,
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        "patches_in_text",
        {
            "text_config": {
                **_GROUPED,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "vision_start_token_id": 1,
            "vision_end_token_id": 2,
            "image_token_id": 3,
            "video_token_id": 4,
        },
    ),
    "LongformerForMaskedLM": ("long_text", {**_SIZES, "attention_window": 8}),
}
