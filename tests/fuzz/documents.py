"""Documents for `ithaca data`: text, JSONL, folders, and what an earlier command left, damaged or lying."""

import os
import random
from pathlib import Path

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, writes

BYTES = ("--out", "out.tokens")
BPE = (*BYTES, "--tokenizer", "tokenizer")
TOKENIZER = copies("tokenizer")


def data(name: str, path: str, build: Build, expect: Expected = "either", more: tuple[str, ...] = BYTES) -> Input:
    return Input(name, ("data", path, *more), build if more == BYTES else all_of(TOKENIZER, build), expect)


def texts(chance: random.Random) -> list[Input]:
    found = []
    wrong = {"empty": b"", "a zero byte": b"abc\0def", "zeros": b"\0" * 9000}
    only_bpe = {"invalid UTF-8": b"abc\xff\xfe", "a cut character": "雪".encode()[:2], "a surrogate": b"\xed\xa0\x80"}
    fine = {"BOM": b"\xef\xbb\xbfabc", "one byte": b"a", "no line ends": b"a" * 100_000, "special": b"<end><end> <end>"}
    fine |= {
        "line ends": b"\r\n\r\r\n\n",
        "marks": "e\u0301\u200d\ufeff\U000e0001".encode(),
        "long word": b"z" * 300_000,
    }
    for more in (BYTES, BPE):
        found += [data(name, "a.txt", writes("a.txt", text), "error", more) for name, text in wrong.items()]
        found += [data(name, "a.txt", writes("a.txt", text), "ok", more) for name, text in fine.items()]
        for name, text in only_bpe.items():
            found.append(data(name, "a.txt", writes("a.txt", text), "error" if more == BPE else "ok", more))
    for number in range(6):
        text = bytes(chance.randrange(1, 256) for _ in range(500))
        found.append(data(f"random bytes {number}", "a.txt", writes("a.txt", text), more=BPE))
    for name in ("a.tokens", "a", "a.JSONL", ".hidden", "a.npy.txt", "-a", "a b.txt", "\udcff.txt", "a.jsonl.gz"):
        path = f"./{name}" if name.startswith("-") else name
        found.append(data(f"a file called {shown(name)}", path, writes(name, b"words of text")))
    return numbered("text", found)


LINES: list[tuple[str, Expected]] = [
    ("{", "error"),
    ("[]", "error"),
    ("3", "error"),
    ("null", "error"),
    ('"text"', "error"),
    ("{}", "error"),
    ('{"other": "x"}', "error"),
    ('{"text": 3}', "error"),
    ('{"text": null}', "error"),
    ('{"text": ["a"]}', "error"),
    ('{"text": {"a": 1}}', "error"),
    ('{"text": "a"} {"text": "b"}', "error"),
    ('{"text": "a",}', "error"),
    ("{'text': 'a'}", "error"),
    ('{"text": "a"', "error"),
    ('{"text": NaN}', "error"),
    ('{"prompt": "a"}', "error"),
    ('{"completion": "a"}', "error"),
    ('{"prompt": 1, "completion": "a"}', "error"),
    ('{"prompt": "a", "completion": null}', "error"),
    ('{"tokens": "abc"}', "error"),
    ('{"tokens": 3}', "error"),
    ('{"tokens": [1.5]}', "error"),
    ('{"tokens": ["1"]}', "error"),
    ('{"tokens": [null]}', "error"),
    ('{"tokens": [-1]}', "error"),
    ('{"tokens": [4294967296]}', "error"),
    ('{"tokens": [1e400]}', "error"),
    ('{"tokens": [[1]]}', "error"),
    ('{"tokens": [true]}', "error"),
    ('{"tokens": {"0": 1}}', "error"),
    ('{"tokens": [' + "9" * 5000 + "]}", "error"),
    ('{"tokens": [NaN]}', "error"),
    ('{"tokens": [1, 2], "text": "a"}', "either"),
    ('{"text": "a", "prompt": "b", "completion": "c"}', "either"),
    ('{"text": "a", "text": "b"}', "either"),
    ('{"text": "\\ud800"}', "either"),
    ('{"text": "\\u0000"}', "either"),
    ('{"text": ""}', "either"),
    ('{"tokens": []}', "either"),
    ('{"tokens": [1.0]}', "either"),
    ('{"prompt": "", "completion": ""}', "either"),
    ('{"prompt": "all", "completion": ""}', "either"),
    ("[" * 100_000, "error"),
    ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "error"),
    ('{"a": ' * 50_000 + "1" + "}" * 50_000, "error"),
    ("\ufeff" + '{"text": "a"}', "either"),
    ('{"text": "a"}\r', "ok"),
    ('{"text": "a\x01b"}', "either"),
    ("\0" * 100, "error"),
    ("\udcff", "error"),
    ('{"text": "\udcff"}', "either"),
]


def jsonl(chance: random.Random) -> list[Input]:
    """One line, alone and between sound ones."""
    found = []
    for line, expect in LINES:
        more = chance.choice([BYTES, BPE])
        found.append(data(f"alone {shown(line)}", "a.jsonl", writes("a.jsonl", line), expect, more))
        kind = '{"tokens": [1, 2]}\n' if '"tokens"' in line else '{"text": "sound"}\n'
        found.append(data(f"between {shown(line)}", "a.jsonl", writes("a.jsonl", f"{kind}\n{line}\n{kind}"), expect))
    mixed = '{"text": "a"}\n{"tokens": [1]}\n'
    found.append(data("text and tokens", "a.jsonl", writes("a.jsonl", mixed), "error"))
    found.append(data("text and tokens, a tokenizer", "a.jsonl", writes("a.jsonl", mixed), "ok", BPE))
    outside = '{"tokens": [1, 300]}\n'
    found.append(data("a token outside the tokenizer", "a.jsonl", writes("a.jsonl", outside), "error", BPE))
    found.append(data("blank lines alone", "a.jsonl", writes("a.jsonl", "\n\n \n"), "error"))
    return numbered("jsonl", found)


def _tree(kind: str) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        inside = folder / "in"
        inside.mkdir()
        if kind != "hidden files alone":
            (inside / "a.txt").write_text("sound")
        match kind:
            case "a link to itself":
                (inside / "b").symlink_to("b")
            case "a dangling link":
                (inside / "b.txt").symlink_to("nowhere")
            case "a link to its parent":
                (inside / "up").symlink_to("..")
            case "a pipe":
                os.mkfifo(inside / "b.txt")
            case "a socket":
                os.mknod(inside / "b.txt", 0o140644)
            case "hidden files alone":
                (inside / ".a.txt").write_text("hidden")
            case "a name that is no UTF-8":
                Path(os.fsdecode(os.fsencode(inside) + b"/\xff.txt")).write_text("x")
            case "a line end in a name":
                (inside / "a\nb.jsonl").write_text("{")
            case "a binary file":
                (inside / "b").write_bytes(b"\0" * 99)
            case "a folder called a.jsonl":
                (inside / "b.jsonl").mkdir()
            case "a deep folder":
                deep = inside.joinpath(*["d" * 200] * 15)
                deep.mkdir(parents=True)
                (deep / "a.txt").write_text("deep")
            case "an empty file":
                (inside / "b.txt").write_text("")
            case "a broken line":
                (inside / "b.jsonl").write_text("{")
            case "a token file":
                toys.copy("good.tokens", inside)
            case "a link to a file outside":
                (folder / "outside.txt").write_text("outside")
                (inside / "b.txt").symlink_to("../outside.txt")

    return build


TREES: dict[str, Expected] = {
    "a link to itself": "either",
    "a dangling link": "either",
    "a link to its parent": "ok",
    "a pipe": "either",
    "a socket": "either",
    "hidden files alone": "error",
    "a name that is no UTF-8": "either",
    "a line end in a name": "error",
    "a binary file": "ok",
    "a folder called a.jsonl": "ok",
    "a deep folder": "either",
    "an empty file": "either",
    "a broken line": "error",
    "a token file": "either",
    "a link to a file outside": "either",
}


def folders(chance: random.Random) -> list[Input]:
    found = [data(kind, "in", _tree(kind), expect) for kind, expect in TREES.items()]
    for kind in ("a pipe", "a socket", "a dangling link"):
        found.append(data(f"{kind}, named", "in/b.txt", _tree(kind), "error"))
    return numbered("folder", found)


def partials(chance: random.Random) -> list[Input]:
    """What an interrupted command could have left, damaged."""
    found = []
    sound = copies("books")
    contents = {"no bytes": b"", "text": b"garbage", "zeros": b"\0" * 8192, "JSON": b'{"state": 3}'}
    for name, content in contents.items():
        build = all_of(sound, writes("out.tokens.partial", content))
        found.append(data(f"out.tokens.partial: {name}", "books", build, "ok"))
    found.append(data("out.tokens.partial: a folder", "books", all_of(sound, writes("out.tokens.partial/x", b""))))
    return numbered("partial", found)


MUTATORS = [texts, jsonl, folders, partials]
