"""Adapters of PEFT, each in a small Llama whose own parameters are frozen."""

from __future__ import annotations

import functools
from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from third_party.case import Case, Inputs

VOCABULARY, LENGTH, WIDTH = 64, 10, 32
SQUARE, ALL = ["q_proj", "o_proj"], ["q_proj", "v_proj", "down_proj"]
OF_RANK_4: dict[str, Any] = {"r": 4, "target_modules": ALL}
VIRTUAL = {"num_virtual_tokens": 3}

# Method: the name of its configuration, and what that is given.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {**OF_RANK_4, "lora_dropout": 0.1}),
    "LoRA of embeddings": ("LoraConfig", {**OF_RANK_4, "target_modules": [*ALL, "embed_tokens"]}),
    "LoRA with a trained head": ("LoraConfig", {**OF_RANK_4, "modules_to_save": ["lm_head"]}),
    "LoRA with trained tokens": ("LoraConfig", {**OF_RANK_4, "trainable_token_indices": [1, 5]}),
    "LoRA of a parameter": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
    "rsLoRA": ("LoraConfig", {**OF_RANK_4, "use_rslora": True}),
    "DoRA": ("LoraConfig", {**OF_RANK_4, "use_dora": True}),
    "PiSSA": ("LoraConfig", {**OF_RANK_4, "init_lora_weights": "pissa"}),
    "AdaLoRA": ("AdaLoraConfig", {"target_modules": ALL, "total_step": 10}),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": SQUARE}),
    "RandLoRA": ("RandLoraConfig", {"r": 4, "target_modules": SQUARE}),
    "VB-LoRA": ("VBLoRAConfig", {**OF_RANK_4, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    "GraLoRA": ("GraloraConfig", {**OF_RANK_4, "gralora_k": 2}),
    "DeLoRA": ("DeloraConfig", OF_RANK_4),
    "LoHa": ("LoHaConfig", OF_RANK_4),
    "LoKr": ("LoKrConfig", OF_RANK_4),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "OFT": ("OFTConfig", {**OF_RANK_4, "oft_block_size": 0}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "boft_n_butterfly_factor": 1, "target_modules": ALL}),
    "HRA": ("HRAConfig", OF_RANK_4),
    "MiSS": ("MissConfig", OF_RANK_4),
    "C3A": ("C3AConfig", {"block_size": 4, "target_modules": SQUARE}),
    "RoAd": ("RoadConfig", {"target_modules": ALL, "group_size": 8}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10, "target_modules": ALL}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 16, "target_modules": ALL}),
    "SHiRA": ("ShiraConfig", OF_RANK_4),
    "LayerNorm tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "prompt tuning": ("PromptTuningConfig", VIRTUAL),
    "prefix tuning": ("PrefixTuningConfig", VIRTUAL),
    "P-tuning": ("PromptEncoderConfig", {**VIRTUAL, "encoder_hidden_size": 16}),
    "LLaMA-Adapter": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 2}),
}


def build(name: str) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH,
    )
    method, settings = METHODS[name]
    adapted: nn.Module = peft.get_peft_model(
        LlamaForCausalLM(config), getattr(peft, method)(task_type="CAUSAL_LM", **settings)
    )
    return adapted


def tokens() -> Inputs:
    drawn = torch.randint(VOCABULARY, (2, LENGTH))
    return {"input_ids": drawn, "labels": drawn}


def cases() -> list[Case]:
    return [Case("peft", name, functools.partial(build, name), tokens) for name in METHODS]
