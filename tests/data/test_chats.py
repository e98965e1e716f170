"""Conversations: the tokens of `transformers`, the masks of a template that marks its turns, every spelling."""

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from ithaca.base.errors import DataError
from ithaca.data.chat import turns as chat_turns
from ithaca.data.chat.mask import ignored_ranges, learned_tokens
from ithaca.data.chat.render import Renderer
from ithaca.data.chat.template import ChatFormat, load_format
from ithaca.data.preparation import encode
from ithaca.data.preparation.command import run
from ithaca.data.preparation.encode import Encoded, Encoding
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.records import columns, document
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens
from tests.data.chat_styles import CHATML, QWEN3, STYLES, TOOLS, conversation, marked, plain, save_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ASK, ANSWER = {"role": "user", "content": "how is the sea?"}, {"role": "assistant", "content": "wine-dark"}
FULL = [pytest.param(40), pytest.param(300, marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)


def _encoded(folder: Path, template: str, records: list[dict], **options: Any) -> list[list[Encoded]]:
    """The samples of each record."""
    renderer = Renderer(ChatFormat("'t'", {"default": template}, TOKENS, **options))
    encoding = Encoding(load_tokenizer(folder), mixed=True, chats=renderer)
    names = [str(number) for number in range(len(records))]
    found = list(encode.encode([document(*pair) for pair in zip(names, records, strict=True)], encoding))
    encoding.close()
    return [[one for one in found if one.where == name] for name in names]


def _ids(made: Encoded) -> list[int]:
    return np.concatenate(made.parts).tolist()


def _mask(made: Encoded) -> list[int]:
    mask = np.ones(len(_ids(made)), int)
    for tokens in made.ignored:
        mask[tokens.start : tokens.stop] = 0
    return mask.tolist()


def _wanted(reference: PreTrainedTokenizerFast, template: str, record: dict) -> tuple[list[int], list[int]]:
    made = reference.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        chat_template=marked(template),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize("count", FULL)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [plain, marked])
def test_tokens_and_masks_of_transformers(folder: Path, reference, style: str, kind, count: int) -> None:
    chance = random.Random(f"{style} {count}")
    records = [conversation(chance, style) for _ in range(count)]
    tokens = masks = 0
    for record, made in zip(records, _encoded(folder, kind(STYLES[style]), records, choice="turns"), strict=True):
        ids, mask = _wanted(reference, STYLES[style], record)
        plain_ids = reference.apply_chat_template(
            record["messages"], tools=record.get("tools"), chat_template=plain(STYLES[style]), return_dict=False
        )
        assert _ids(made[-1]) == ids == plain_ids
        tokens += 1
        if len(made) == 1:
            assert _mask(made[-1]) == mask
            masks += 1
    assert tokens == count
    assert masks == count or (style == "qwen3" and kind is plain and masks > 0)


@pytest.mark.parametrize("count", FULL)
def test_one_sample_a_turn_is_each_prefix_alone(folder: Path, reference, count: int) -> None:
    """Qwen3 writes the thinking of the last answer only; without tools no two turns share a text."""
    chance = random.Random(count)
    records = [conversation(chance, "qwen3", thinking=True) for _ in range(2 * count)]
    records = [record for record in records if "tools" not in record]
    assert len(records) > count // 2
    for record, made in zip(records, _encoded(folder, plain(QWEN3), records), strict=True):
        ends = [at + 1 for at, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        assert len(made) == len(ends)
        for sample, end in zip(made, ends, strict=True):
            ids, mask = _wanted(reference, QWEN3, {"messages": record["messages"][:end]})
            assert _ids(sample) == ids
            last = len(mask) - mask[::-1].index(0)  # of the marked turns only the last is this sample's
            assert _mask(sample) == [0] * last + [1] * (len(mask) - last)


@pytest.mark.parametrize("count", FULL)
def test_every_turn_is_learned_once_behind_its_own_prompt(reference, count: int) -> None:
    chance = random.Random(count + 1)
    records = [conversation(chance, "qwen3", thinking=True) for _ in range(count)]
    renderer = Renderer(ChatFormat("'t'", {"default": plain(QWEN3)}, TOKENS, choice="turns"))
    made = list(renderer.render([str(document("", record).content) for record in records], [""] * count))
    renderer.close()
    fewer = 0
    for number, record in enumerate(records):
        messages, render = record["messages"], reference.apply_chat_template
        samples = [sample for sample in made if sample.conversation == number]
        found = [(sample.text[:start], sample.text[start:end]) for sample in samples for start, end in sample.spans]
        options = {"tools": record.get("tools"), "chat_template": plain(QWEN3), "tokenize": False}
        wanted = []
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = render(messages[:at], add_generation_prompt=True, **options)
                wanted.append((prompt, render(messages[: at + 1], **options).removeprefix(prompt)))
        assert found == wanted
        fewer += len(samples) < len(wanted)
    assert fewer  # turns of one trajectory share a sample


def test_an_agents_trajectory_is_one_sample_of_few_renderings() -> None:
    asked = []

    def render(count: int, prompt: bool) -> str:
        asked.append((count, prompt))
        return "".join(f"<{at}>" for at in range(count)) + ("<" if prompt else "")

    ((text, spans),) = chat_turns.samples(render, 401, range(1, 401, 2), "whole")
    assert text == render(401, False)
    assert [text[start:end] for start, end in spans] == [f"{at}>" for at in range(1, 401, 2)]
    assert len(asked) == len(set(asked)) + 1 == 2 * 200 + 2  # one more for the line above


def test_samples_that_would_grow_are_refused_unless_asked_for() -> None:
    def render(count: int, prompt: bool) -> str:  # the last message differs
        return "".join(f"<{at}>" for at in range(count - (not prompt))) + ("<" if prompt else f"<{count - 1}!>")

    turns = range(1, 101, 2)
    with pytest.raises(chat_turns.NoSpan, match="would become 50 samples, over 16 times as long together"):
        list(chat_turns.samples(render, 101, turns, ""))
    with pytest.raises(chat_turns.NoSpan, match="--chat turns makes several samples"):
        list(chat_turns.samples(render, 5, [1, 3], "whole"))
    made = list(chat_turns.samples(render, 101, turns, "turns"))
    assert [text for text, _ in made] == [render(at + 1, False) for at in turns]
    assert [text[start:end] for text, ((start, end),) in made] == [f"{at}!>" for at in turns]


def test_what_follows_the_last_turn_is_kept_if_it_changes_nothing(folder: Path, reference) -> None:
    record = {"messages": [ASK, ANSWER, ASK]}
    ((made,),) = _encoded(folder, plain(CHATML), [record])
    assert _ids(made) == _wanted(reference, CHATML, record)[0]
    thinking = {"messages": [ASK, {**ANSWER, "reasoning_content": "hm"}, ASK]}
    ((made,),) = _encoded(folder, plain(QWEN3), [thinking])  # the last question would remove the thinking
    assert _ids(made) == _wanted(reference, QWEN3, {"messages": thinking["messages"][:2]})[0]


SPELLINGS = [
    {"conversations": [{"from": "human", "value": "how is the sea?"}, {"from": "gpt", "value": "wine-dark"}]},
    {"conversations": [ASK, ANSWER]},
    {"prompt": [ASK], "completion": [ANSWER]},
    {"instruction": "how is the sea?", "output": "wine-dark"},
    {"instruction": "how is the sea?", "input": "", "output": "wine-dark", "system": None, "history": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "how is "}, "the sea?"]}, ANSWER]},
    {"messages": [ASK, {**ANSWER, "weight": 1, "train": True}], "tools": None},
    {"messages": [{**ASK, "name": None, "tool_calls": None}, ANSWER], "tools": []},
]


@pytest.mark.parametrize("record", SPELLINGS)
def test_spellings(record: dict) -> None:
    found = json.loads(str(document("r", record).content))
    assert found == {"messages": [ASK, ANSWER], "tools": None, "variables": {}, "learned": [1]}


def test_alpaca_with_everything() -> None:
    record = {"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["q", "r"]]}
    found = json.loads(str(document("r", record).content))
    spoken = [(message["role"], message["content"]) for message in found["messages"]]
    assert spoken == [("system", "s"), ("user", "q"), ("assistant", "r"), ("user", "a\nb"), ("assistant", "c")]
    assert found["learned"] == [2, 4]


def test_sharegpt_with_tools(folder: Path, reference) -> None:
    call = {"name": "wind", "arguments": {"where": "雪"}}
    turns = [("human", "hm"), ("function_call", json.dumps(call)), ("observation", "calm"), ("gpt", "calm")]
    record = {
        "conversations": [{"from": speaker, "value": value} for speaker, value in turns],
        "system": "s",
        "tools": json.dumps(TOOLS),
    }
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "calm"},
        {"role": "assistant", "content": "calm"},
    ]
    for style in ("chatml", "llama3", "mistral"):
        ((made,),) = _encoded(folder, plain(STYLES[style]), [record])
        assert (_ids(made), _mask(made)) == _wanted(reference, STYLES[style], {"messages": messages, "tools": TOOLS})


@pytest.mark.parametrize("kind", [plain, marked])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, {**ANSWER, "train": False}, ASK, ANSWER]},
        {"messages": [ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "weight": 1}]},
        {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
    ],
)
def test_messages_that_are_not_learned(folder: Path, reference, kind, record: dict) -> None:
    ids, mask = _wanted(reference, CHATML, {"messages": [ASK, ANSWER, ASK, ANSWER]})
    ((made,),) = _encoded(folder, kind(CHATML), [record])
    assert _ids(made) == ids
    second = mask.index(1, mask.index(0, mask.index(1)))
    assert _mask(made) == [0] * second + mask[second:]


def test_reasoning_under_each_name_and_variables(folder: Path, reference) -> None:
    names = ("reasoning_content", "thinking", "reasoning")
    records: list[dict] = [{"messages": [ASK, {**ANSWER, name: "hm"}]} for name in names]
    for record, (made,) in zip(records, _encoded(folder, plain(QWEN3), records), strict=True):
        assert (_ids(made), _mask(made)) == _wanted(reference, QWEN3, record)
    quick = {"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}
    ((made,),) = _encoded(folder, plain(QWEN3), [quick])
    learned = [token for token, bit in zip(_ids(made), _mask(made), strict=True) if bit]
    assert reference.decode(learned) == "wine-dark<|im_end|>\n"  # the empty thinking belongs to the prompt here


def test_a_content_that_is_missing_is_empty(folder: Path) -> None:
    call = {"type": "function", "function": {"name": "wind", "arguments": {}}}
    records = [
        {"messages": [ASK, {"role": "assistant", "tool_calls": [call], **more}]}
        for more in ({"content": ""}, {"content": None}, {})
    ]
    first, *others = _encoded(folder, plain(CHATML), records)
    assert [_ids(made[0]) for made in others] == [_ids(first[0])] * 2


def test_a_table_fills_missing_fields_with_null(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "wind", "arguments": {"where": "here"}}}
    other = {"type": "function", "function": {"name": "rain", "arguments": {"days": 3}}}
    records = [
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [one]}], "tools": TOOLS}
        for one in (call, other)
    ]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert "days" in rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]  # null, as Arrow does it
    found = [json.loads(str(document("r", row, table=True).content)) for row in rows]
    assert found == [json.loads(str(document("r", record).content)) for record in records]


def test_columns_of_a_table() -> None:
    assert columns(Path("a"), ["id", "tools", "messages", "prompt"]) == ["messages", "tools"]
    assert columns(Path("a"), ["output", "input", "instruction"]) == ["instruction", "output", "input"]
    assert columns(Path("a"), ["output", "instruction", "text"], "text") == ["text"]
    assert columns(Path("a"), ["tokens", "text"]) == ["text"]
    with pytest.raises(DataError, match=r"has 'text' and 'instruction', and only one of them can be used.*--field"):
        columns(Path("a"), ["output", "instruction", "text"])  # such a text has the prompt, which would be learned


def test_tokens_across_a_border_are_learned() -> None:
    offsets = np.array([(0, 2), (2, 5), (5, 6), (5, 6), (6, 9), (9, 9), (9, 10)])  # (9, 9): a trimmed space
    assert learned_tokens(offsets, [(4, 7)], 10).tolist() == [False, True, True, True, True, False, False]
    assert learned_tokens(offsets, [(5, 6)], 10).tolist() == [False, False, True, True, False, False, False]
    assert learned_tokens(offsets, [(6, 9)], 10).tolist() == [False, False, False, False, True, True, False]
    assert learned_tokens(offsets, [(9, 10), (3, 3)], 10).tolist() == [False] * 6 + [True]
    assert learned_tokens(np.zeros((0, 2), int), [], 0).tolist() == []
    assert ignored_ranges(np.array([False, True, True, False, False])) == (range(1), range(3, 5))
    assert ignored_ranges(np.ones(3, bool)) == ()


def test_a_newline_that_joins_the_header(folder: Path, reference) -> None:
    """The answer begins with the newline that the header ends with, and one token stands for both."""
    record = {"messages": [ASK, {"role": "assistant", "content": "\n\nx"}]}
    ((made,),) = _encoded(folder, plain(STYLES["llama3"]).replace(" | trim", ""), [record])
    ids, mask = _wanted(reference, STYLES["llama3"].replace(" | trim", ""), record)
    assert (_ids(made), _mask(made)) == (ids, mask)


def test_offsets_without_their_spaces(folder: Path, tmp_path: Path) -> None:
    """Llama 3's post-processor takes spaces out of the offsets; an answer that begins with one is learned anyway."""
    records = [{"messages": [ASK, {"role": "assistant", "content": text}]} for text in (" x", "x  ", "  x y ")]
    trimmed, whole = (
        [(_ids(made), _mask(made)) for (made,) in _encoded(place, plain(CHATML), records)]
        for place in (save_tokenizer(tmp_path, trim_offsets=True), folder)
    )
    assert trimmed == whole


def test_the_template_writes_the_end_alone(folder: Path) -> None:
    ((ended,), (open_end,)) = (
        _encoded(folder, template, [{"messages": [ASK, ANSWER]}])[0]
        for template in (plain(STYLES["mistral"]), plain(CHATML))
    )
    end = load_tokenizer(folder).end
    assert _ids(ended)[-1] == end
    assert _ids(ended).count(end) == 1
    assert end not in _ids(open_end)


def test_where_the_template_is_found(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert load_format(tmp_path, None, None).templates == {}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for template, wanted in (("a", {"default": "a"}), (named, {"default": "a", "tool_use": "b"})):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        assert load_format(tmp_path, None, None).templates == wanted
    (tmp_path / "chat_template.jinja").write_text("c")
    found = load_format(tmp_path / "tokenizer.json", None, "whole")
    assert (found.templates, found.tokens, found.choice) == ({"default": "c"}, TOKENS, "whole")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert load_format(tmp_path, None, None).templates == {"default": "c", "tool_use": "d"}
    (tmp_path / "other.jinja").write_text("e")
    assert load_format(tmp_path, tmp_path / "other.jinja", None).templates == {"default": "e"}


def test_the_template_for_tools() -> None:
    form = ChatFormat("'t'", {"default": "plain", "tool_use": "tools"}, {})
    contents = [str(document("r", {"messages": [ASK], "tools": tools}).content) for tools in (None, TOOLS, [])]
    renderer = Renderer(form)
    assert [made.text for made in renderer.render(contents, ["r"] * 3)] == ["plain", "tools", "plain"]
    renderer.close()


def test_names_that_templates_use(folder: Path, reference) -> None:
    template = (
        "{%- for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.items()|length }}{{ m.missing }}"
        "{{- m.content.split('?')[0]|upper }}{% endfor %}{{ {'<': [1, none, 'é']}|tojson(indent=1) }}"
        "{%- set ns = namespace(a=1) %}{% set ns.b = ns.a + 1 %}{{ ns.b }}{{ ns.c is defined }}{{ dict(x=1).x }}"
        "{{- strftime_now('%Y') }}{{ bos_token }}{{ tools is none }}{{ messages[9] is undefined }}"
    )
    ((made,),) = _encoded(folder, template, [{"messages": [ASK, {**ANSWER, "train": 0}, ASK]}])
    wanted = reference.apply_chat_template([ASK, ANSWER, ASK], chat_template=template, return_dict=False)
    assert _ids(made) == wanted


def test_a_renderer_goes_to_other_processes() -> None:
    renderer = Renderer(ChatFormat("'t'", {"default": plain(CHATML)}, TOKENS))
    content = str(document("r", {"messages": [ASK, ANSWER]}).content)
    (here,) = renderer.render([content], ["r"])
    (copied,) = (copy := pickle.loads(pickle.dumps(renderer))).render([content], ["r"])
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        (forked,) = renderer.render([content], ["r"])
        os.write(write, b"same" if forked == here else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"same"
    (again,) = renderer.render([content], ["r"])
    assert here == copied == again
    for pipe in (read, write):
        os.close(pipe)
    copy.close()
    renderer.close()


def test_samples_are_encoded_in_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [*[{"messages": [ASK, ANSWER]}] * 3, {"messages": [ASK, ANSWER, ASK, ANSWER]}]
    wanted = [[_ids(made) for made in samples] for samples in _encoded(folder, plain(QWEN3), records)]
    assert [len(samples) for samples in wanted] == [1, 1, 1, 2]
    monkeypatch.setattr(encode, "_BATCH", 1)
    made = _encoded(folder, plain(QWEN3), records)
    assert [[_ids(sample) for sample in samples] for samples in made] == wanted
    assert [[sample.sample for sample in samples] for samples in made] == [[1], [1], [1], [1, 2]]


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(plain(QWEN3))
    records = [{"text": "the sea"}, {"messages": [ASK, ANSWER, ASK, ANSWER]}, {"messages": [ASK]}]
    records += [{"messages": [ASK, ANSWER]}, {"prompt": "p", "completion": "c"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    out = tmp_path / "out.tokens"
    run([tmp_path / "chats.jsonl"], out, tmp_path, False, None, None)
    lines = capsys.readouterr().out.splitlines()
    data = open_tokens(out)
    assert data.documents == 6
    share = 100 * data.header.labels / data.tokens
    assert f"Chats: 3 conversations became 4 samples; {share:.1f} % of all tokens count in the loss" in lines
    assert any(line.startswith("Divided: 1 conversation, because the chat template writes a turn") for line in lines)
    named = f"'{tmp_path / 'chats.jsonl'}', line 3"
    assert f"Warning: no token counts in the loss in 1 conversation, the first is {named}" in lines
    learned = data.read(0, data.tokens).learned
    assert learned is not None
    bounds = data.bounds()
    third = slice(bounds[3], bounds[4])
    assert not learned[third].any()
    with pytest.raises(DataError, match="line 2: the chat template"):
        run([tmp_path / "chats.jsonl"], tmp_path / "whole", tmp_path, False, None, None, chat="whole")


def test_a_run_that_was_stopped_counts_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jinja").write_text(plain(CHATML))
    chats = tmp_path / "chats.jsonl"
    line = json.dumps({"messages": [ASK, ANSWER]})
    chats.write_text(f"{line}\n{line}\n" + json.dumps({"messages": [ASK]}) + f"\n{line}")
    outs = [tmp_path / "once", tmp_path / "twice"]
    program = (
        "import sys, os; from pathlib import Path; from ithaca.data.preparation import prepare as p\n"
        "from ithaca.data.preparation.command import load_format, load_tokenizer\n"
        "place, chats, out, template = map(Path, sys.argv[1:])\n"
        "seen = []\n"
        "def stop(self, *args):\n    seen.append(0); len(seen) == 4 and os._exit(9); return add(self, *args)\n"
        "add, p.Partial.add = p.Partial.add, stop\n"
        "p.prepare([chats], out, load_tokenizer(place), chats=load_format(place, template, None), "
        "journal_seconds=0, group_bytes=1)"
    )
    words = [sys.executable, "-c", program, *map(str, (folder, chats, outs[1], tmp_path / "t.jinja"))]
    assert subprocess.run(words, check=False).returncode == 9
    other = [*words[:3], *map(str, (folder, chats, outs[1], tmp_path / "other.jinja"))]
    (tmp_path / "other.jinja").write_text(plain(QWEN3))
    done = subprocess.run(other, check=False, capture_output=True, text=True)
    assert (done.returncode, "again: the part on disk is from other" in done.stdout) == (9, True)
    assert "again" in subprocess.run(words, check=False, capture_output=True, text=True).stdout
    for out in outs:
        run([chats], out, folder, False, None, None, chat_template=tmp_path / "t.jinja")
        said = capsys.readouterr().out
        assert "Chats: 4 conversations became 4 samples" in said
        assert "no token counts in the loss in 1 conversation, the first is" in said
    assert "Continuing" in said
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_processes_and_bad_conversations(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many processes encode, the file is the same; --skip-bad goes on behind what the template refuses."""
    (tmp_path / "t.jinja").write_text(
        plain(QWEN3) + "{% if messages[0].content == 'bad' %}{{ raise_exception('bad') }}{% endif %}"
    )
    chance = random.Random(5)
    records = [conversation(chance, "qwen3", thinking=True) for _ in range(30)]
    records[7:7] = [{"messages": [{**ASK, "content": "bad"}, ANSWER]}, {"messages": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    options: dict[str, Any] = {"skip_bad": True, "chats": load_format(folder, tmp_path / "t.jinja", "turns")}
    made = []
    for workers, size in ((1, 1 << 20), (1, 2000), (2, 2000)):
        out = tmp_path / f"{workers}-{size}"
        prepare([tmp_path / "a.jsonl"], out, load_tokenizer(folder), workers=workers, group_bytes=size, **options)
        made.append(out.read_bytes())
    assert made[0] == made[1] == made[2]
    how: dict[str, Any] = {"skip_bad": True, "chat_template": tmp_path / "t.jinja"}
    run([tmp_path / "a.jsonl"], tmp_path / "out", folder, False, None, None, chat="turns", **how)
    said = capsys.readouterr().out
    assert (tmp_path / "out").read_bytes() == made[0]
    assert "Skipped: 2 bad files or records, the first of them:" in said
    assert "line 8 cannot be rendered by the chat template" in said
    assert "Chats: 30 conversations became" in said
    (tmp_path / "t.jinja").write_text("{% if %}")  # no conversation can be good
    with pytest.raises(DataError, match="is not a Jinja template"):
        run([tmp_path / "a.jsonl"], tmp_path / "no", folder, False, None, None, **how)
