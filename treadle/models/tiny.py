"""A causal language model small enough for tests, made here in about a second.

Guarantees: the same arguments give the same bits; every text round-trips through the tokenizer
(bytes, one token each); the chat template is ChatML with tool calls and is prefix-stable, so that
rendering more messages never changes what came before. Importing this file imports no torch.

Takes: a directory. Gives: a Hugging Face directory (config, safetensors, tokenizer, template).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from treadle.models.quiet import quiet_transformers

RECIPE = "tiny-1"
"""Changes whenever the files that `build_random` writes change."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: padding and end of document, start of a turn, end of a turn."""

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One token each, and ordinary text: they survive `skip_special_tokens`."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one with <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>{"name": ' + call.name | tojson + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build_random(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    max_context: int = 1024,
    tied: bool = True,
    seed: int = 0,
) -> None:
    """Write a Llama with random weights into `directory` (made if missing).

    Linear weights have standard deviation 1/sqrt(inputs) and the head one that gives logits of
    about 2 nats, so that distributions are neither flat nor one-hot.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    _write(directory, LlamaForCausalLM, config, tokenizer, seed)


def build_random_moe(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 8,
    experts_per_token: int = 2,
    intermediate: int = 64,
    max_context: int = 1024,
    seed: int = 0,
) -> None:
    """As `build_random`, a Qwen3-MoE: every layer has experts, of `intermediate` each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,  # pyright: ignore[reportCallIssue]
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    _write(directory, Qwen3MoeForCausalLM, config, tokenizer, seed)


def _write(directory: Path, architecture: Any, config: Any, tokenizer: Any, seed: int) -> None:
    import torch
    from transformers import GenerationConfig

    directory.mkdir(parents=True, exist_ok=True)
    with quiet_transformers(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = architecture(config)
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            # The head sees a vector of length sqrt(hidden) after the last norm.
            head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            weight.normal_(std=(2.0 if head else 1.0) / math.sqrt(weight.shape[-1]))
        model.generation_config = GenerationConfig(eos_token_id=[2], pad_token_id=0)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def build_tokenizer() -> Any:
    """A byte-level tokenizer without merges: 3 special ids, 4 markers, then the 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in SPECIAL])
    raw.add_tokens([AddedToken(n, special=False, normalized=False) for n in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
