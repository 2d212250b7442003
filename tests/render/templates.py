"""A toy tokenizer with merges and small chat templates that have the quirks of real ones."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MERGES = (("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("\u010a", "\u010a"))
"""The last one: two newlines are one token, as in most real vocabularies."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Prefix-stable; knows no tools."""

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}"
    "{% endif %}" + CHATML
)
"""As SmolLM2: a default system message appears when none is given."""

BOS_CHATML = "{{ bos_token }}" + CHATML

NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Gemma: no system role, strict alternation, content trimmed."""

_TOOLS_HEAD = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}"
    "{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_USERS = (
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
)
_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

TOOLS = (
    _TOOLS_HEAD + "{% for m in messages %}" + _USERS + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' + m.content }}" + _CALLS + "{{ '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% endif %}{% endfor %}" + _OPEN
)
"""Hermes tools, all native, prefix-stable."""

_THOUGHT = (
    "{% set ns = namespace(thought='', content=m.content) %}"
    "{% if m.reasoning_content %}{% set ns.thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}"
    "{% set ns.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set ns.content = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
THINKING = (
    _TOOLS_HEAD + "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    + _USERS
    + "{% elif m.role == 'assistant' %}"
    + _THOUGHT
    + "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > last.user and (loop.last or ns.thought) %}"
    "{{ '<think>\\n' + ns.thought + '\\n</think>\\n\\n' }}{% endif %}{{ ns.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}{% elif m.role == 'tool' %}"
    + _RESULTS
    + "{% endif %}{% endfor %}"
    + _OPEN
)
"""As Qwen3: thinking of turns before the last user message is dropped."""

KEEPS_THINKING = THINKING.replace(
    "loop.index0 > last.user and (loop.last or ns.thought)", "ns.thought"
)
"""Thinking is kept in every turn."""

OPENS_THINKING = (
    "{{ bos_token }}{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set c = c.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""As DeepSeek-R1: the prompt opens the thinking, history never shows it."""

FIELD_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>\\n' + (m.reasoning_content or '') "
    "+ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Reads the reasoning field alone; inline tags would land behind an empty block."""

STRICT_CALLS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('call ids must have length 9') }}{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
    "{{ raise_exception('a tool result must follow a call') }}{% endif %}"
    "{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('role not supported') }}{% endif %}{% endfor %}"
)
"""As Mistral: tools stand before the last user message, calls are a JSON list."""

ENDS_WITH_EOS = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""As Phi-3: without a generation prompt an extra EOS closes the conversation."""

NO_MARKERS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""No special token anywhere: a turn ends with a newline."""

ALL = {
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "bos_chatml": BOS_CHATML,
    "no_system": NO_SYSTEM,
    "tools": TOOLS,
    "thinking": THINKING,
    "keeps_thinking": KEEPS_THINKING,
    "opens_thinking": OPENS_THINKING,
    "field_only": FIELD_ONLY,
    "strict_calls": STRICT_CALLS,
    "ends_with_eos": ENDS_WITH_EOS,
    "no_markers": NO_MARKERS,
}


def toy_tokenizer(
    template: str | None = CHATML,
    *,
    eos: str = "<|im_end|>",
    prepend_bos: bool = False,
    merges: Sequence[tuple[str, str]] = MERGES,
    word_marks: bool = False,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over all bytes in which "hello" is one token, made in memory.

    `prepend_bos`: the tokenizer itself puts <s> in front when asked for special tokens.
    `word_marks`: a mark stands for the space before a word and in front of every text, as in
    SentencePiece.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if word_marks:
        chars = [*map(chr, range(33, 127)), "\n", "\u2581"]
        pairs = [("\u2581", c) for c in chars[:-2]]
        vocab = {t: i for i, t in enumerate([*chars, *(a + b for a, b in pairs)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    if prepend_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
