"""Conversations from records, whatever a data set calls their fields. The template sees them in one spelling.

    messages                        role and content; with tool_calls, name, tool_call_id, reasoning_content …
    conversations                   ShareGPT: from and value; human, gpt, system, function_call, observation
    prompt and completion           as lists of messages; only the completion is learned
    instruction, input and output   Alpaca, with `system` and `history`

`tools` may stand beside each. A conversation is kept as JSON text until it is rendered, so its length is a text's.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ithaca.base.errors import DataError, shown, suggestion

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_BESIDE = ("tools", "chat_template_kwargs")

# The fields that make a record a conversation, and those that may stand beside them
SPELLINGS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): _BESIDE,
    ("conversations",): ("system", *_BESIDE),
    ("prompt", "completion"): _BESIDE,
    ("instruction", "output"): ("input", "system", "history", *_BESIDE),
}

Message = dict[str, Any]


def conversation(where: str, record: dict[str, Any], table: bool = False) -> str:
    """Return the JSON of a record's messages, tools and variables, and the messages that are learned.

    `table`: the record is a row. Rows have every field that any row has, null where it is missing.
    """
    spelling = next(fields for fields in SPELLINGS if all(field in record for field in fields))
    record = _without_nulls(record) if table else record
    found = _READERS[spelling](where, record)
    if not found:
        raise DataError(f"{where} is a conversation without messages: a message of the user and an answer are needed")
    messages = [_message(f"{where}, message {number}", message) for number, message in enumerate(found, 1)]
    content = {
        "messages": [_shown_to_the_template(message) for message in messages],
        "tools": _tools(where, record.get("tools")),
        "variables": _variables(where, record.get("chat_template_kwargs")),
        "learned": [number for number, message in enumerate(messages) if message["train"]],
    }
    try:
        text = json.dumps(content, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} has half a surrogate pair in its messages: write whole characters") from None
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"{where} holds something that JSON cannot: write text, numbers, lists and objects") from None
    return text


def _messages(where: str, record: dict[str, Any]) -> list[Message]:
    return _list(where, record, "messages")


def _sharegpt(where: str, record: dict[str, Any]) -> list[Message]:
    return [*_system(where, record), *_list(where, record, "conversations")]


def _prompt(where: str, record: dict[str, Any]) -> list[Message]:
    prompt = [
        {**message, "train": False} if isinstance(message, dict) else message
        for message in _list(where, record, "prompt")
    ]
    return prompt + _list(where, record, "completion")


def _alpaca(where: str, record: dict[str, Any]) -> list[Message]:
    pairs = record.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError(f'{where} has a \'history\' that is not a list of pairs: write [["question", "answer"]]')
    for field in ("instruction", "output"):
        if record.get(field) is None:  # an empty answer would be learned
            raise DataError(f"{where} has a '{field}' of type null: text is needed")
    question, more = (_text(where, record, field) for field in ("instruction", "input"))
    pairs = [*pairs, [f"{question}\n{more}" if more else question, _text(where, record, "output")]]
    turns = [({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in pairs]
    return [*_system(where, record), *(message for turn in turns for message in turn)]


_READERS: dict[tuple[str, ...], Callable[[str, dict[str, Any]], list[Message]]] = {
    ("messages",): _messages,
    ("conversations",): _sharegpt,
    ("prompt", "completion"): _prompt,
    ("instruction", "output"): _alpaca,
}


def _system(where: str, record: dict[str, Any]) -> list[Message]:
    text = _text(where, record, "system")
    return [{"role": "system", "content": text}] if text else []


def _text(where: str, record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where} has a '{field}' of type {type(value).__name__}: text is needed")
    return value or ""


def _list(where: str, record: dict[str, Any], field: str) -> list[Any]:
    value = record.get(field)
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        example = '[{"role": "user", "content": "…"}]'
        raise DataError(f"{where} has '{field}' of type {kind}: a list of messages is needed, as {example}")
    return value


def _message(where: str, found: Any) -> Message:
    """Return a message with role, content and `train`."""
    if not isinstance(found, dict):
        raise DataError(f'{where} is {shown(found)}: an object is needed, as {{"role": "user", "content": "…"}}')
    message = {name: value for name, value in found.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(where, message)
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has the role {shown(role)}: {suggestion(str(role), ROLES)}")
    if "function_call" in message:
        raise DataError(f"{where} has a 'function_call': write it as 'tool_calls', a list of calls")
    if "tool_calls" in message:
        _check_calls(where, message["tool_calls"])
    return {**message, "content": _content(where, message), "train": _learned(where, message)}


def _from_sharegpt(where: str, message: Message) -> Message:
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    speaker, value = message["from"], message.get("value")
    role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if role not in ROLES:
        raise DataError(f"{where} is from {shown(speaker)}: {suggestion(str(speaker), [*_SHAREGPT, *ROLES])}")
    if speaker == "function_call":
        return {**rest, "role": role, "content": "", "tool_calls": _parsed_calls(where, value)}
    return {**rest, "role": role, "content": value}


def _parsed_calls(where: str, value: Any) -> list[Any]:
    """Return the tool calls that ShareGPT writes as JSON text: one object, or a list of them."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f'{where} has a call {shown(value)}: write {{"name": "…", "arguments": {{…}}}}')
    return [{"type": "function", "function": call} for call in calls]


def _check_calls(where: str, calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(calls, list) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where} has 'tool_calls' {shown(calls)}: write "
                '[{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
            )


def _content(where: str, message: Message) -> str:
    """Return the text of a message. Parts of text are joined: templates for text write nothing for a list."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(where, part) for part in content)
    if content is None and message["role"] == "assistant" and ("tool_calls" in message or _thought(message)):
        return ""
    kind = "no 'content'" if content is None else f"a 'content' of type {type(content).__name__}"
    raise DataError(f"{where} has {kind}: text, or a list of parts of text, is needed")


def _part(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise DataError(f"{where} has a part {shown(kind)}: only parts of text are supported")
    return text


def _learned(where: str, message: Message) -> bool:
    """Return whether a message is learned: the assistant's are, unless `train` or `weight` says 0 or false."""
    flags = {name: message[name] for name in ("train", "weight") if name in message}
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(f"{where} has {shown(value)} as its '{name}': 0 or 1 is needed")
    wanted = all(flags.values())
    if flags and wanted and message["role"] != "assistant":
        raise DataError(f"{where} is the {message['role']}'s and has 'train' or 'weight' 1: only the assistant's can")
    return wanted and message["role"] == "assistant"


def _thought(message: Message) -> Any:
    return next((message[name] for name in _REASONING if name in message), None)


def _shown_to_the_template(message: Message) -> Message:
    """Return a message without our flags, its reasoning under both names that templates read."""
    message = {name: value for name, value in message.items() if name not in ("train", "weight")}
    thought = _thought(message)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _tools(where: str, tools: Any) -> Sequence[Any] | None:
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except (ValueError, RecursionError):
        raise DataError(f"{where} has 'tools' as text that is not JSON: write a list of objects") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where} has 'tools' {shown(tools)}: a list of objects is needed")
    return tools


def _variables(where: str, variables: Any) -> dict[str, Any]:
    taken = ("messages", "tools", "documents", "add_generation_prompt")
    if variables is None:
        return {}
    if not isinstance(variables, dict) or any(name in variables for name in taken):
        raise DataError(
            f"{where} has 'chat_template_kwargs' {shown(variables)}: "
            'an object is needed, as {"enable_thinking": false}, without messages and tools'
        )
    return variables


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
