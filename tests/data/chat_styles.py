"""Chat templates by hand in the styles of known families, tokenizers for them, and random conversations.

A template holds `[[` and `]]` around what the assistant writes. Without them it is a plain template; with them replaced
by the generation tag it marks its own spans, which is what the plain one is compared with.
"""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<think>", "</think>", "<tool_call>", "</tool_call>"),
]

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        [[
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        ]]
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = 'Cutting Knowledge Date: December 2023', messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- for tool in tools or [] %}
    {{- '\\n\\n' + tool | tojson(indent=4) }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        [[
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
        ]]
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        [[
        {{- message.content | trim + '<|eot_id|>' }}
        ]]
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- set ns = namespace(system='', index=0) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content + '\\n\\n' %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and ns.index == 0 %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (ns.system if ns.index == 0 else '') + message.content + '[/INST]' }}
        {%- set ns.index = ns.index + 1 %}
    {%- elif message.tool_calls is defined %}
        [[
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
        ]]
    {%- elif message.role == 'assistant' %}
        [[
        {{- ' ' + message.content + eos_token }}
        ]]
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thinking = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        [[
        {%- if loop.index0 > ns.last and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        ]]
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

STYLES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3}
WORDS = [
    "the wine-dark sea",
    "ünïcödé",
    "雪",
    "🜚",
    "\n",
    "  ",
    "",
    "x",
    "<b>&'\"",
    "\\",
    "\t1,234.5",
    "Ithaka",
    "{{ 7 }}",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wind",
            "description": "Says <how> the wind & sea are; 雪",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def plain(template: str) -> str:
    """The template without marks."""
    return template.replace("        [[\n", "").replace("        ]]\n", "").strip("\n")


def marked(template: str) -> str:
    """The template with the generation tag."""
    return template.replace("[[", "{%- generation %}").replace("]]", "{%- endgeneration %}").strip("\n")


def save_tokenizer(folder: Path, trim_offsets: bool = False) -> Path:
    """A folder with a small BPE over bytes, and the special tokens of all styles."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    text = " ".join(WORDS) + "system user assistant tool\n\nname arguments function parameters "
    inner.train_from_iterator([text * 8], trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _words(chance: random.Random, most: int = 6) -> str:
    return "".join(chance.choices(WORDS, k=chance.randint(0, most)))


def _call(chance: random.Random) -> dict[str, Any]:
    arguments = {"where": _words(chance), "days": chance.randint(-3, 10**12), "deep": [None, {"a": True, "b": 0.5}]}
    return {"type": "function", "function": {"name": "wind", "arguments": arguments}}


def conversation(chance: random.Random, style: str, thinking: bool = False) -> dict[str, Any]:
    """A random conversation that the style accepts: turns of the user, each answered after some calls of tools."""
    messages: list[dict[str, Any]] = []
    tools = chance.random() < 0.5
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": _words(chance)})
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": _words(chance)})
        for _ in range(chance.randint(0, 3) if tools else 0):
            calls = [_call(chance) for _ in range(1 if style == "llama3" else chance.randint(1, 3))]
            messages.append({"role": "assistant", "content": _words(chance, 2), "tool_calls": calls})
            messages += [{"role": "tool", "name": "wind", "content": _words(chance)} for _ in calls]
        messages.append({"role": "assistant", "content": _words(chance)})
    for message in messages:
        if thinking and message["role"] == "assistant" and chance.random() < 0.7:
            message["reasoning_content"] = "hm, " + _words(chance)
    return {"messages": messages, **({"tools": TOOLS} if tools else {})}
