"""Every kind of input gives the tokens of the plain text; what is not understood is refused and leaves nothing."""

import bz2
import gzip
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from ithaca.base.errors import DataError
from ithaca.data.preparation import hub, json_list
from ithaca.data.preparation.prepare import Prepared, prepare
from ithaca.data.preparation.streams import opened
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens

TEXTS = ["the sea\nbore us", "ünïcödé 雪 🜚", "home", "", "past the island [1, 2] {3}", "x" * 3000]
RECORDS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()
LIST = json.dumps(RECORDS, indent=1, ensure_ascii=False).encode()


def _zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


def _stream(path: Path, records: list[dict], batch: int = 2) -> None:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def _file(path: Path, records: list[dict]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=2)


def _saved(folder: Path, records: list[dict] = RECORDS) -> None:
    """What `Dataset.save_to_disk` writes, in two shards; the second has a name that sorts first."""
    folder.mkdir(parents=True)
    names = ["data-1.arrow", "data-0.arrow"]
    for name, part in zip(names, (records[:2], records[2:]), strict=True):
        _stream(folder / name, part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "a", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')


def _splits(folder: Path, *names: str) -> None:
    for name in names:
        _saved(folder / name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))


KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.ndjson": lambda path: path.write_bytes(LINES + b"\n"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "parts.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES[:99]) + gzip.compress(LINES[99:])),
    "a.jsonl.zst": lambda path: path.write_bytes(_zstd(LINES)),
    "a.json": lambda path: path.write_bytes(LIST),
    "bom.json": lambda path: path.write_bytes(b"\xef\xbb\xbf\n" + LIST),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(LIST)),
    "a.json.zst": lambda path: path.write_bytes(_zstd(json.dumps(RECORDS, separators=(",", ":")).encode())),
    "a.parquet": lambda path: parquet.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=3),
    "stream.arrow": lambda path: _stream(path, RECORDS),
    "file.arrow": lambda path: _file(path, RECORDS),
    "a.feather": lambda path: feather.write_feather(pa.Table.from_pylist(RECORDS), str(path)),
    "saved": _saved,
    "splits": lambda path: _splits(path, "train"),
    "splits/train": lambda path: _splits(path.parent, "train", "test"),
    "above": lambda path: _saved(path / "a" / "saved"),
}


@pytest.fixture(scope="module")
def wanted(bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The token file of the texts as text files; the empty one is skipped."""
    top = tmp_path_factory.mktemp("wanted")
    (top / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (top / "texts" / f"{number}.txt").write_text(text)
    prepare([top / "texts"], top / "out", load_tokenizer(bpe))
    return (top / "out").read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_tokens_of_the_text(tmp_path: Path, bpe: Path, wanted: bytes, name: str) -> None:
    path = tmp_path / name
    KINDS[name](path)
    made = prepare([path], tmp_path / "out", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == wanted
    assert made.empty == 1
    assert made.notes == ((f"Reading split 'train' of '{path}', the only one",) if name == "splits" else ())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.json", "a.parquet", "stream.arrow", "file.arrow"])
def test_reading_continues_behind_any_record(tmp_path: Path, bpe: Path, wanted: bytes, name: str) -> None:
    """With a journal after each document; stopped after 1, 3 and 5 of them."""
    KINDS[name](tmp_path / name)
    for number in range(1, len(TEXTS), 2):
        out = tmp_path / str(number)
        _stop_after(number, tmp_path / name, out, bpe)
        prepare([tmp_path / name], out, load_tokenizer(bpe))
        assert out.read_bytes() == wanted


class _Stop(BaseException):
    pass


def _stop_after(number: int, path: Path, out: Path, bpe: Path) -> None:
    from ithaca.data.preparation.partial import Partial

    reach, left = Partial.reach, number

    def count(self: Partial, place: Any, force: bool = False) -> None:
        nonlocal left
        reach(self, place, force)
        left -= 1
        if left == 0:
            raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "reach", count)
        with pytest.raises(_Stop):
            prepare([path], out, load_tokenizer(bpe), journal_seconds=0, group_bytes=1)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.html", "a.txt.gz", "a.md.zst", "bom.txt", "bom.txt.gz"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_text_files(tmp_path: Path, bpe: Path, name: str, with_tokenizer: bool) -> None:
    text = "the sea ünïcödé\r\n"
    raw = b"\xef\xbb\xbf" * name.startswith("bom") + text.encode()
    pack = {".gz": gzip.compress, ".zst": _zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(raw))
    prepare([tmp_path / name], tmp_path / "out", load_tokenizer(bpe) if with_tokenizer else None)
    found = open_tokens(tmp_path / "out").read(0, open_tokens(tmp_path / "out").tokens).tokens
    tokenizer = load_tokenizer(bpe)
    wanted = [*tokenizer.encode([text])[0].tolist(), 0] if with_tokenizer else list(text.encode())
    assert found.tolist() == wanted


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "saved"])
def test_another_field(tmp_path: Path, bpe: Path, wanted: bytes, name: str) -> None:
    records = [{"body": text, "text": 5, "n": 1} for text in TEXTS]
    path = tmp_path / name
    if name == "saved":
        _saved(path, records)
    elif name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    elif name == "a.arrow":
        _stream(path, records)
    else:
        path.write_text(json.dumps(records) if name == "a.json" else "\n".join(map(json.dumps, records)))
    prepare([path], tmp_path / "out", load_tokenizer(bpe), field="body")
    assert (tmp_path / "out").read_bytes() == wanted


def test_json_lists_of_any_size_and_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read some bytes at a time, so that every element is cut at every place."""
    records = [*RECORDS, {"text": "ü" * 99, "deep": [{"a": [1.5e3, None, True, "]},"]}]}, {}]
    for content in (json.dumps(records), json.dumps(records, indent=3, ensure_ascii=False), "[]", " [ ] \n"):
        (tmp_path / "a.json").write_text(content)
        for size in (1, 7, 64, 10**6):
            monkeypatch.setattr("ithaca.data.preparation.streams.CHUNK", size)
            monkeypatch.setattr(json_list, "CHUNK", size)
            with opened(tmp_path / "a.json", None) as stream:
                assert [found for _, found in json_list.elements(tmp_path / "a.json", stream)] == json.loads(content)


class _Dataset(list):
    """What hub.py and tables.py use of a `datasets.Dataset`."""

    column_names = ("text", "n")
    cache_files = ()

    def select(self, rows: range) -> "_Dataset":
        return _Dataset(self[row] for row in rows)

    def select_columns(self, names: list[str]) -> "_Dataset":
        return _Dataset({name: row[name] for name in names} for row in self)

    def with_format(self, kind: str) -> "_Dataset":
        assert kind == "arrow"
        return self

    def iter(self, size: int):
        yield from (pa.Table.from_pylist(self[at : at + size]) for at in range(0, len(self), size))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """A package `datasets` that knows org/name, with two splits, and one/split. Returns the calls."""
    calls = []

    def load_dataset(*names: str, split: str | None) -> Any:
        calls.append((*names, split))
        if names[0] not in ("org/name", "one/split"):
            raise ConnectionError(f"Couldn't reach '{names[0]}' on the Hub\nand more")
        splits = ("train", "test")[: 1 if names[0] == "one/split" else 2]
        return _Dataset(RECORDS) if split else {name: _Dataset(RECORDS) for name in splits}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hf:org/name:train", ("org/name", "train")),
        ("hf:org/name:train[:50%]", ("org/name", "train[:50%]")),
        ("hf:org/name:english:test", ("org/name", "english", "test")),
        ("hf:one/split", ("one/split", None)),
    ],
)
def test_a_dataset_by_name(
    tmp_path: Path, bpe: Path, wanted: bytes, package: list[tuple], name: str, call: tuple
) -> None:
    made = prepare([Path(name)], tmp_path / "out", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == wanted
    assert package == [call]
    assert made.notes == (() if call[-1] else ("Reading split 'train' of 'hf:one/split', the only one",))
    _stop_after(3, Path(name), tmp_path / "again", bpe)
    prepare([Path(name)], tmp_path / "again", load_tokenizer(bpe))
    assert (tmp_path / "again").read_bytes() == wanted


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:org/name", "'hf:org/name' has the splits train, test: name one, as hf:org/name:train"),
        ("hf:", "'hf:' names no dataset: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"),
        ("hf:a:b:c:d", "names no dataset"),
        ("hf:a::c", "names no dataset"),
        (
            "hf:no/such:train",
            r"no/such:train' cannot be loaded by datasets \(Couldn't reach 'no/such' on the Hub\)",
        ),
    ],
)
@pytest.mark.usefixtures("package")
def test_no_dataset_by_name(tmp_path: Path, name: str, sentence: str) -> None:
    _refused([Path(name)], tmp_path, sentence)


def test_a_dataset_by_name_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    _refused([Path("hf:a")], tmp_path, r"'hf:a' needs the package datasets: pip install 'ithaca\[datasets\]'$")


def test_saved_folders_of_the_package(tmp_path: Path, bpe: Path, wanted: bytes) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert len(hub.saved_files(tmp_path / "saved")) == 2
    prepare([tmp_path / "saved"], tmp_path / "out", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == wanted


def _refused(paths: list[Path], top: Path, sentence: str, **options: Any) -> None:
    before = sorted(top.rglob("*"))
    with pytest.raises(DataError, match=sentence) as error:
        prepare(paths, top / "out", **options)
    assert "\n" not in str(error.value)
    assert error.value.code == 2
    assert sorted(top.rglob("*")) == before


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "the sea")


def _cut(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


SKIPS = "; --skip-bad skips it$"
# name: how it is made, the sentence, and whether a folder that holds it ends with the same sentence or skips it
REFUSED: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "a.pkl": (lambda path: path.write_bytes(pickle.dumps(RECORDS)), "a.pkl' is a pickle, which could run code", False),
    "a.pt": (_zip, "a.pt' is a pickle, which could run code: write its texts", False),
    "a.zip": (_zip, "a.zip' is an archive: unpack it and name the files", False),
    "a.docx": (_zip, "a.docx' is a document with a layout: convert it to text", False),
    "a.pdf": (lambda path: path.write_text("%PDF-1.4"), "a.pdf' is a document with a layout", False),
    "a.csv": (lambda path: path.write_text("text\nsea"), "a.csv' is a table: write it as .jsonl or .parquet", False),
    "a.tsv": (lambda path: path.write_text("text\tn"), "a.tsv' is a table", False),
    "a.npz": (_zip, "a.npz' holds weights or arrays: name text", False),
    "a.safetensors": (lambda path: path.write_text("{}"), "a.safetensors' holds weights or arrays", False),
    "a.tar.gz": (lambda path: path.write_bytes(gzip.compress(b"a")), "a.tar.gz' is an archive: unpack", False),
    "a.bz2": (lambda path: path.write_bytes(bz2.compress(b"a")), "a.bz2' is an archive: unpack", False),
    "a.parquet.gz": (lambda path: path.write_bytes(gzip.compress(b"a")), "is parquet packed by gzip: unpack", False),
    "zip.txt": (_zip, "zip.txt' is an archive: unpack", False),
    "gz.txt": (lambda path: path.write_bytes(gzip.compress(b"a")), "gz.txt' is packed by gzip: give it a name", False),
    "zst.txt": (lambda path: path.write_bytes(_zstd(b"a")), "zst.txt' is packed by zstd: give it a name", False),
    "parquet.txt": (KINDS["a.parquet"], "parquet.txt' is Parquet: give it a name that ends with .parquet", False),
    "arrow.txt": (KINDS["file.arrow"], "arrow.txt' is Arrow: give it a name that ends with .arrow", False),
    "pickle.txt": (lambda path: path.write_bytes(pickle.dumps([1, 2])), "pickle.txt' is a pickle", False),
    "utf16.txt": (
        lambda path: path.write_text("sea", "utf-16"),
        "utf16.txt' is UTF-16: convert it with `iconv -f",
        False,
    ),
    "utf32.txt": (
        lambda path: path.write_text("sea", "utf-32"),
        "utf32.txt' is UTF-32: convert it with `iconv -f",
        False,
    ),
    "utf16.jsonl": (lambda path: path.write_text('{"text": "a"}', "utf-16"), "utf16.jsonl' is UTF-16", False),
    "binary.txt.gz": (
        lambda path: path.write_bytes(gzip.compress(b"a\0")),
        "is binary, with a zero byte at off",
        False,
    ),
    "object.json": (
        lambda path: path.write_text('{"text": "a"}'),
        "object.json' is not a list of objects: write",
        False,
    ),
    "numbers.json": (lambda path: path.write_text("[1, 2]"), "numbers.json' is not a list of objects: write", False),
    "lines.json": (
        lambda path: path.write_bytes(LINES),
        "lines.json' is not a list of objects: .* in a file named",
        False,
    ),
    "half.json": (lambda path: _cut(path, LIST), r"half.json' is not JSON \(.*, near byte \d+\)" + SKIPS, True),
    "comma.json": (
        lambda path: path.write_text('[{"text": "a"} {}]'),
        r"not JSON \(no ',' or ']' near b.*" + SKIPS,
        True,
    ),
    "behind.json": (lambda path: path.write_text('[{"text": "a"}] x'), "has text after its list: keep one list", True),
    "bad.json": (lambda path: path.write_text('[{"text": }]'), r"bad.json' is not JSON \(Expecting value", True),
    "number.json": (
        lambda path: path.write_text('[{"text": 5}]'),
        "object 1 has a 'text' of type int" + ".*" + SKIPS,
        True,
    ),
    "mixed.json": (lambda path: path.write_text('[{"text": "a"}, 5]'), "object 2 is not an object: write", True),
    "latin.json": (lambda path: path.write_bytes(b'[{"text": "\xfc"}]'), "not UTF-8 at byte offset 11 .0xfc.", True),
    "half.jsonl.gz": (
        lambda path: _cut(path, gzip.compress(os.urandom(9999).hex().encode())),
        "cannot be unpacked",
        True,
    ),
    "no.jsonl.gz": (
        lambda path: path.write_bytes(b"no gzip"),
        r"no.jsonl.gz' cannot be unpacked \(Not a gzipped",
        True,
    ),
    "half.jsonl.zst": (lambda path: _cut(path, _zstd(LINES)), r"half.jsonl.zst' cannot be unpacked \(", True),
    "no.txt.zst": (lambda path: path.write_bytes(b"no zstd"), r"no.txt.zst' cannot be unpacked \(", True),
    "no.arrow": (lambda path: path.write_text("text"), r"no.arrow' is not Arrow \(.*" + SKIPS, True),
    "half.arrow": (
        lambda path: (KINDS["stream.arrow"](path), _cut(path, path.read_bytes())),
        "half.arrow' is not",
        True,
    ),
    "columns.arrow": (
        lambda path: _stream(path, [{"txt": "a"}]),
        "columns.arrow' has the columns 'txt': 'text', 'pr",
        True,
    ),
    "null.arrow": (
        lambda path: _stream(path, [{"text": "a"}, {"text": None}]),
        "row 2 has a 'text' of type null",
        True,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    make, sentence, ends = REFUSED[name]
    (tmp_path / "f").mkdir()
    path = tmp_path / "f" / name
    make(path)
    _refused([path], tmp_path, sentence)
    (tmp_path / "f" / "z.jsonl").write_text('{"text": "sea"}')
    if ends:
        _refused([tmp_path / "f"], tmp_path, sentence)
    else:
        made = prepare([tmp_path / "f"], tmp_path / "out")
        assert made.others == (path,)
        assert open_tokens(tmp_path / "out").tokens == 3


def test_saved_folders_refused(tmp_path: Path) -> None:
    _splits(tmp_path / "two", "train", "test")
    _refused([tmp_path / "two"], tmp_path, "two' holds the splits test, train: name one, as '.*/two/test'")
    _refused([tmp_path], tmp_path, "two' holds the splits test, train: name one")
    _saved(tmp_path / "saved")
    (tmp_path / "saved" / "data-0.arrow").unlink()
    _refused([tmp_path / "saved"], tmp_path, r"saved' is a saved dataset without '.*data-0.arrow': copy it again")
    for state in ("{}", "[", '{"_data_files": 5}', '{"_data_files": [{"filename": 5}]}'):
        (tmp_path / "saved" / "state.json").write_text(state)
        _refused([tmp_path / "saved"], tmp_path, "state.json' lists no Arrow files: save the dataset again")
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../two/train/data-0.arrow"}]}')
    _refused([tmp_path / "saved"], tmp_path, "is a saved dataset without")


def test_options_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}')
    parquet.write_table(pa.Table.from_pylist([{"txt": "a"}]), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("a")
    line = "line 1 has no 'body', which --field names: it has 'txt'; --skip-bad"
    _refused([tmp_path / "a.jsonl"], tmp_path, line, field="body")
    table = "a.parquet' has no 'body', which --field names: it has 'txt'$"
    _refused([tmp_path / "a.parquet"], tmp_path, table, field="body")
    _refused([tmp_path / "a.parquet"], tmp_path, table, field="body", skip_bad=True)
    _refused([tmp_path / "a.txt"], tmp_path, "--field body is for records, and .*a.txt' has none", field="body")
    _refused([tmp_path / "a.txt"], tmp_path, "--workers 0 is too few: 1 to ", workers=0)
    _refused([tmp_path / "none"], tmp_path, "none' does not exist: name a file or a folder, or a dataset as hf:NAME")


def test_zstd_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KINDS["a.jsonl.zst"](tmp_path / "a.jsonl.zst")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    _refused([tmp_path / "a.jsonl.zst"], tmp_path, r"needs pyarrow: pip install 'ithaca\[parquet\]'$", skip_bad=True)


def _bad_folder(top: Path) -> Path:
    """Three good documents, and bad ones of several kinds."""
    top.mkdir()
    (top / "a.py").write_bytes(b"# gr\xfc\xdfe")
    (top / "b.txt").write_text("the sea")
    (top / "c.jsonl").write_text('{"text": "home"}\n{"text": 5}\n{"text": "island"\n\n{"text": "us"}')
    (top / "d.jsonl.gz").write_bytes(b"no gzip")
    (top / "e.json").write_text('[{"text": "past"}, {"text": ]')
    return top


def _skip_bad(top: Path, bpe: Path, out: Path, **options: Any) -> Prepared:
    return prepare([top], out, load_tokenizer(bpe), skip_bad=True, **options)


def test_skip_bad(tmp_path: Path, bpe: Path) -> None:
    top = _bad_folder(tmp_path / "f")
    with pytest.raises(DataError, match=r"d.jsonl.gz' cannot be unpacked.*" + SKIPS):
        prepare([top], tmp_path / "out", load_tokenizer(bpe))
    made = _skip_bad(top, bpe, tmp_path / "out")
    assert made.bad == 5
    assert len(made.first_bad) == 3
    assert made.first_bad[0].startswith(f"'{top}/d.jsonl.gz' cannot be unpacked")
    assert made.first_bad[1].startswith(f"'{top}/a.py' is not UTF-8 at byte offset 4 (0xfc)")
    assert made.first_bad[2].startswith(f"'{top}/c.jsonl', line 2 has a 'text' of type int")
    (tmp_path / "good.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in ("the sea", "home", "us", "past"))
    )
    prepare([tmp_path / "good.jsonl"], tmp_path / "wanted", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_skip_bad_counts_the_same_when_resumed(tmp_path: Path, bpe: Path) -> None:
    top = _bad_folder(tmp_path / "f")
    made = _skip_bad(top, bpe, tmp_path / "wanted")
    (top / "d.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"a.py' is not UTF-8"):
        prepare([top], tmp_path / "out", load_tokenizer(bpe), journal_seconds=0, group_bytes=1)
    (top / "a.py").unlink()
    with pytest.raises(DataError, match="line 2 has a 'text'"):
        prepare([top], tmp_path / "out", load_tokenizer(bpe), journal_seconds=0, group_bytes=1)
    assert (tmp_path / "out.partial.journal").exists()  # there is something to continue, with the option
    said = _skip_bad(top, bpe, tmp_path / "out")
    assert (said.bad, made.bad) == (3, 5)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_part_with_skipped_records_is_not_continued_without_the_option(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n{"text": "home"}\n{"text": "us"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.data.preparation.partial.Partial.finish", lambda *_: (_ for _ in ()).throw(_Stop))
        with pytest.raises(_Stop):
            _skip_bad(tmp_path / "a.jsonl", bpe, tmp_path / "out")
    with pytest.raises(DataError, match="line 1 has a 'text' of type int"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", load_tokenizer(bpe))


def test_skip_bad_where_a_text_cannot_be_encoded(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "sea"}\n{"tokens": [999]}\n{"tokens": [5]}')
    with pytest.raises(DataError, match="line 2 has token id 999, and ids go from 0 to 299.*" + SKIPS):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", load_tokenizer(bpe))
    made = _skip_bad(tmp_path / "a.jsonl", bpe, tmp_path / "out")
    assert (made.header.documents, made.bad) == (2, 1)
    (tmp_path / "b.jsonl").write_text('{"text": "sea"}\n{"tokens": [9]}')
    with pytest.raises(DataError, match="line 2 is ready tokens among text: name the tokenizer"):
        prepare([tmp_path / "b.jsonl"], tmp_path / "b", skip_bad=True)


def test_nothing_but_bad_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n{"txt": ""}')
    why = "as --skip-bad skipped 2 bad files or records: .*line 1 has a 'text' of type int.*; .*line 2 has the fields"
    _refused([tmp_path / "a.jsonl"], tmp_path, f"a.jsonl' has no token in its 2 documents, {why}", skip_bad=True)
    (tmp_path / "a.jsonl").write_text(4 * '{"text": 5}\n' + '{"text": ""}')
    _refused(
        [tmp_path / "a.jsonl"], tmp_path, "in its 5 documents, .*4 bad.*line 1 .*line 3 .*int.*; …$", skip_bad=True
    )
