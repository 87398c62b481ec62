"""Random models of a few layers and a byte tokenizer, made on the spot: a real engine starts on them in seconds.

The weights are larger than usual, so that a wrong byte of KV moves the log-probabilities by far more than 1e-3.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512


def make_tiny_model(directory: Path, *, seed: int = 0, max_model_len: int = 2048) -> Path:
    """Write config, float32 weights and tokenizer into `directory`; return it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_model_len,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=None,
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def make_tiny_adapter(directory: Path, *, seed: int) -> Path:
    """Write a random LoRA adapter for all of a tiny model's attention into `directory`, over what is there."""
    source = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
    weights = {}
    for layer in range(2):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn((8, 128), generator=source)
            weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn((size, 8), generator=source)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(sizes), "bias": "none"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def make_tiny_windowed_model(directory: Path, *, full_layers: bool, max_model_len: int = 2048) -> Path:
    """Write a random Gemma 3 of 6 layers with windows of 64 tokens, one of them full attention if asked for."""
    torch.manual_seed(0)
    kinds = ["sliding_attention"] * 6
    if full_layers:
        kinds[5] = "full_attention"
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_model_len,
        initializer_range=0.15,
        sliding_window=64,
        layer_types=kinds,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=None,
        dtype="float32",
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, no merges; the last id ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=None)
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    return fast
