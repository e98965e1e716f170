"""Wrong conversations, templates and options: one sentence, code 2, no file and no process left behind."""

import json
import os
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import psutil
import pytest

from ithaca.base.errors import DataError
from ithaca.data.chat import render as chat_render
from ithaca.data.chat.render import Renderer
from ithaca.data.chat.template import TEMPLATE_BYTES, ChatFormat
from ithaca.data.preparation.command import run
from ithaca.data.preparation.records import document
from tests.data.chat_styles import CHATML, QWEN3, plain, save_tokenizer

ASK, ANSWER = {"role": "user", "content": "how is the sea?"}, {"role": "assistant", "content": "wine-dark"}
GOOD = {"messages": [ASK, ANSWER]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("chat"))


def _renderers() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if "chat.worker" in " ".join(process.cmdline())]


def _says(message: object, **more: object) -> dict:
    return {"messages": [ASK, message], **more}


RECORDS = {
    "no list": ({"messages": "hello"}, "'messages' of type str: a list of messages is needed"),
    "null": ({"messages": None}, "'messages' of type null: a list of messages is needed"),
    "no messages": ({"messages": []}, "is a conversation without messages"),
    "no object": (_says("hello"), "message 2 is 'hello': an object is needed"),
    "no role": (_says({"content": "x"}), "message 2 has the role None: known are system, user, assistant, tool"),
    "wrong role": (_says({"role": "asistant", "content": "x"}), "role 'asistant': did you mean 'assistant'"),
    "a role that is a list": (_says({"role": ["user"], "content": "x"}), r"has the role \['user'\]"),
    "no content": (_says({"role": "assistant"}), "message 2 has no 'content': text, or a list of parts of text"),
    "null from the user": ({"messages": [{"role": "user", "content": None}]}, "message 1 has no 'content'"),
    "a number": (_says({"role": "user", "content": 7}), "a 'content' of type int: text"),
    "an image": (_says({"role": "user", "content": [{"type": "image", "url": "x"}]}), "has a part 'image': only"),
    "a part that is a number": (_says({"role": "user", "content": [3]}), "has a part 3: only parts of text"),
    "half a character": (_says({"role": "user", "content": "\ud800"}), "half a surrogate pair in its messages"),
    "old calls": (_says({"role": "assistant", "content": "", "function_call": {}}), "write it as 'tool_calls'"),
    "calls that are text": (_says({"role": "assistant", "tool_calls": "x"}), "has 'tool_calls' 'x': write"),
    "calls without a name": (_says({"role": "assistant", "tool_calls": [{"function": {}}]}), "has 'tool_calls'"),
    "a weight of a half": (_says({**ANSWER, "weight": 0.5}), "has 0.5 as its 'weight': 0 or 1 is needed"),
    "a flag that is text": (_says({**ANSWER, "train": "no"}), "has 'no' as its 'train': 0 or 1 is needed"),
    "a user who is learned": (_says({**ASK, "train": True}), "message 2 is the user's and has 'train' or 'weight' 1"),
    "tools that are text": (_says(ANSWER, tools="none"), "'tools' as text that is not JSON"),
    "tools that are names": (_says(ANSWER, tools=["wind"]), r"has 'tools' \['wind'\]: a list of objects"),
    "variables that are text": (_says(ANSWER, chat_template_kwargs="x"), "has 'chat_template_kwargs' 'x'"),
    "variables that hide": (_says(ANSWER, chat_template_kwargs={"messages": []}), "without messages and tools"),
    "text and messages": ({"text": "x", **GOOD}, "has 'text' and 'messages', and only one of them can be used"),
    "two conversations": ({"conversations": [ASK], **GOOD}, "has 'messages' and 'conversations', and only"),
    "an unknown speaker": (
        {"conversations": [{"from": "hooman", "value": "x"}]},
        "is from 'hooman': did you mean 'human'",
    ),
    "nothing said": ({"conversations": [{"from": "human"}]}, "message 1 has no 'content'"),
    "a call that is no JSON": ({"conversations": [{"from": "function_call", "value": "x"}]}, "has a call 'x': write"),
    "a prompt of both kinds": ({"prompt": "x", "completion": [ANSWER]}, "has 'prompt' of type str: a list of messages"),
    "an output of numbers": ({"instruction": "x", "output": [1]}, "has a 'output' of type list: text is needed"),
    "no output": ({"instruction": "x", "output": None}, "has a 'output' of type null: text is needed"),
    "a history of names": (
        {"instruction": "x", "output": "y", "history": ["a"]},
        "'history' that is not a list of pairs",
    ),
    "no known field": (
        {"chosen": [ASK]},
        "has the fields 'chosen': 'text', 'prompt' and 'completion', 'tokens', 'mess",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str) -> None:
    record, sentence = RECORDS[name]
    with pytest.raises(DataError, match=sentence) as error:
        document("'a.jsonl', line 1", record)
    assert str(error.value).startswith("'a.jsonl', line 1")
    assert "\n" not in str(error.value)


# What goes through the whole command: template, records and options
COMMANDS: dict[str, tuple[str | bytes | None, list, dict, str]] = {
    "a record": (plain(CHATML), [GOOD, {"messages": "x"}], {}, "line 2 has 'messages' of type str"),
    "no template": (
        None,
        [GOOD],
        {},
        "line 1 is a conversation, and the tokenizer has no chat template: name one with",
    ),
    "syntax": ("a\n{% if %}", [GOOD], {}, r"chat_template.jinja' is not a Jinja template \(line 2: "),
    "an unknown tag": ("{% generate %}", [GOOD], {}, r"not a Jinja template \(line 1: Encountered unknown tag"),
    "an unknown filter": ("{{ messages|nope }}", [GOOD], {}, "cannot be rendered by .*No filter named 'nope'"),
    "refused": ("{{ raise_exception('no\nthanks') }}", [GOOD], {}, r"line 1 cannot be rendered by .* \(no"),
    "an undefined name": ("{{ a.b.c }}", [GOOD], {}, r"cannot be rendered by .*'a' is undefined"),
    "a wrong type": ("{{ 1 + 'a' }}", [GOOD], {}, "cannot be rendered by .*unsupported operand"),
    "division": ("{{ 1 / 0 }}", [GOOD], {}, "cannot be rendered by .*division by zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [GOOD], {}, "cannot be rendered by .*recursion"),
    "the sandbox": ("{{ ''.__class__.__mro__ }}", [GOOD], {}, "cannot be rendered by .*unsafe"),
    "the sandbox by a filter": ("{{ ''|attr('__class__') }}{{ x() }}", [GOOD], {}, "cannot be rendered by"),
    "a namespace's inside": ("{% set n = namespace(__class__=1) %}", [GOOD], {}, "cannot hold the name '__class__'"),
    "changing messages": ("{{ messages.append(1) }}", [GOOD], {}, "cannot be rendered by .*unsafe"),
    "a file": ("{% include '/etc/passwd' %}", [GOOD], {}, "cannot be rendered by .*loader"),
    "half a character": ("{{ '%c'|format(55296) }}", [GOOD], {}, "it writes half a surrogate pair"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", [GOOD], {}, "cannot be rendered by .*Range too big"),
    "much text": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'sea'*99 }}{% endfor %}{% endfor %}",
        *([GOOD], {}, r"writes more than 10\d+ characters, 16 for each byte and 1 MiB"),
    ),
    "a text of 10 GB": ("{{ 'a' * 10**10 }}", [GOOD], {}, "takes more than 512 MiB of memory"),
    "a list of 10 GB": ("{{ ([0] * 10**10)|length }}", [GOOD], {}, "takes more than 512 MiB of memory"),
    "the answer before its prompt": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}now{% endif %}",
        *([GOOD], {}, r"does not write message 2 behind its own generation prompt, 'how is the sea\?now'"),
    ),
    "the assistant first": (
        "{{ messages[0].role }}",
        *(
            [{"messages": [ANSWER]}],
            {},
            "a conversation that begins with the assistant: put a message of the user first",
        ),
    ),
    "a template in Latin-1": (b"\xe9", [GOOD], {}, "chat_template.jinja' is not UTF-8: .*`iconv -f LATIN1 -t UTF-8`"),
    "a large template": (
        b" " * (TEMPLATE_BYTES + 1),
        [GOOD],
        {},
        f"{TEMPLATE_BYTES + 1} bytes, and {TEMPLATE_BYTES} are",
    ),
    "flags beside marks": (
        "{% generation %}{{ messages[1].content }}{% endgeneration %}",
        *(
            [{"messages": [ASK, ANSWER, ASK, {**ANSWER, "train": 0}]}],
            {},
            "marks 1 spans for 2 messages of the assistant",
        ),
    ),
    "whole": (plain(QWEN3), [{"messages": [ASK, ANSWER] * 2}], {"chat": "whole"}, "--chat turns makes several"),
    "growth": (plain(QWEN3), [{"messages": [ASK, ANSWER] * 40}], {}, "would become 40 samples, over 16 times as long"),
    "an unknown choice": (plain(CHATML), [GOOD], {"chat": "turn"}, "--chat 'turn' is unknown: 'turns' makes"),
    "no such template": (None, [GOOD], {"chat_template": Path("none")}, r"'none' cannot be read \(No such file"),
    "a folder as template": (None, [GOOD], {"chat_template": Path("/")}, r"'/' cannot be read \(Is a directory"),
    "no tokenizer": (None, [GOOD], {"tokenizer": None}, "line 1 is a conversation: name the model's tokenizer with"),
    "a choice alone": (None, [GOOD], {"tokenizer": None, "chat": "turns"}, "--chat needs a tokenizer"),
    "a template alone": (
        None,
        [GOOD],
        {"tokenizer": None, "chat_template": Path("t")},
        "--chat-template needs a token",
    ),
    "a choice for --stats": (
        None,
        [GOOD],
        {"stats": True, "tokenizer": None, "out": None, "chat": "turns"},
        "leave out --chat",
    ),
}


@pytest.fixture
def place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(place: Path, name: str) -> None:
    template, records, options, sentence = COMMANDS[name]
    if template is not None:
        content = template.encode() if isinstance(template, str) else template
        (place / "chat_template.jinja").write_bytes(content)
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    before = sorted(place.iterdir())
    given = {"out": place / "out", "tokenizer": place, "stats": False, "picture": None, "bin_dtype": None, **options}
    with pytest.raises(DataError, match=sentence) as error:
        run([place / "a.jsonl"], **given)
    assert error.value.code == 2
    assert "\n" not in str(error.value)
    error.value.__traceback__ = None  # it holds the frames, and they the process
    assert not _renderers()
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",  # within one instruction of Python, where no signal handler would run
        "{% macro f(n) %}{% for i in range(2) if n %}{{ f(n - 1) }}{% endfor %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_templates_that_do_not_end(template: str) -> None:
    renderer = Renderer(ChatFormat("'t'", {"default": template}, {}, seconds=0.3))
    with pytest.raises(DataError, match="computes for more than 0"):
        list(renderer.render([str(document("r", GOOD).content)], ["'r'"]))
    assert not _renderers()


def test_the_name_is_that_of_the_conversation() -> None:
    """The second of three, whose first was rendered and whose third never is."""
    template = "{% if messages[0].content == 'x' %}{{ raise_exception('x') }}{% endif %}y"
    good, bad = (str(document("r", {"messages": [{**ASK, "content": text}]}).content) for text in "yx")
    renderer = Renderer(ChatFormat("'t'", {"default": template}, {}))
    found = renderer.render([good, bad, good], ["1", "2", "3"])
    assert next(found).text == "y"
    with pytest.raises(DataError, match="2 cannot be rendered by the chat template"):
        next(found)
    assert [made.text for made in renderer.render([good] * 2, ["4", "5"])] == ["y", "y"]  # it starts again
    renderer.close()


def test_a_conversation_that_is_too_long_for_its_renderer_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_render, "_PROGRAM", "raise SystemExit(3)")
    renderer = Renderer(ChatFormat("'t'", {"default": "x"}, {}))
    with pytest.raises(DataError, match=r"ended the process that renders it \(code 3\)"):
        list(renderer.render([json.dumps({"messages": ["x" * 10**6]})], ["r"]))


def test_nothing_outlives_a_killed_command(place: Path) -> None:
    """The template would run for minutes of computing; its process ends with the one that asked."""
    (place / "chat_template.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    (place / "a.jsonl").write_text(json.dumps(GOOD))
    words = [sys.executable, "-m", "ithaca", "data", "a.jsonl", "--out", "out", "--tokenizer", "."]
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    process, until = psutil.Process(command.pid), time.monotonic() + 60
    while not (below := process.children(recursive=True)) and time.monotonic() < until:
        time.sleep(0.05)
    assert below
    command.kill()
    command.wait()
    assert not psutil.wait_procs(below, timeout=60)[1]


@pytest.mark.parametrize("version", [None, "3.1.5"])
def test_jinja_is_an_extra(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    find, renderer = util.find_spec, Renderer(ChatFormat("'t'", {"default": "x"}, {}))
    if version is None:
        monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "jinja2" else find(name, *rest))
    else:
        monkeypatch.setattr(chat_render.metadata, "version", lambda _: version)
    with pytest.raises(DataError, match=r"r is a conversation, and .*: pip install 'ithaca\[chat\]'"):
        list(renderer.render([json.dumps(GOOD)], ["r"]))


def test_the_command_prints_one_line_and_code_2(place: Path) -> None:
    (place / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    (place / "a.jsonl").write_text(json.dumps(GOOD))
    words = [sys.executable, "-m", "ithaca", "data", "a.jsonl", "--out", "out", "--tokenizer", "."]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "400"})
    assert done.returncode == 2
    assert "cannot be rendered by the chat template" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert len((done.stderr + done.stdout).strip().splitlines()) == 1
