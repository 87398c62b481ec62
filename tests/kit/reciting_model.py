"""A tiny model that always recites one answer, whatever it is asked: what an engine's parsers make of it is known.

Its next token follows from the last one alone; attention is computed and changes nothing, so KV is real. As with
DeepSeek R1 a prompt ends with the token that begins the thoughts, and a template's history has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.kit.tiny_model import VOCABULARY, byte_tokenizer

_TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}

{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"""
THINK, THOUGHT = "<think>", "</think>"


def make_reciting_model(directory: Path, pieces: Sequence[str], *, max_model_len: int = 2048) -> Path:
    """Write a model into `directory` that answers with these pieces, a token each and all different; return it.

    THOUGHT among them ends the thoughts.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.add_tokens([THINK, *pieces])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_model_len,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float32)
    said = [*tokenizer.encode(THINK), *tokenizer.convert_tokens_to_ids(list(pieces)), VOCABULARY - 1]
    assert len(set(said)) == len(pieces) + 2, "a token is said once"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[said[1:]] = model.model.embed_tokens.weight[said[:-1]]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
