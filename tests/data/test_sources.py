"""Documents out of every kind of file: what goes in comes out, and what cannot is one sentence."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ithaca.base.errors import DataError
from ithaca.data.preparation.inputs import find_inputs
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.records import Document
from ithaca.data.preparation.sources import Place, Reading, documents
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import TokenFile, open_tokens


def _write(path: Path, content: object) -> Path:
    """A file in the format of its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl" and isinstance(content, list):
        path.write_text("\n".join(map(json.dumps, content)), encoding="utf-8")
    elif path.suffix == ".parquet" and isinstance(content, list):
        parquet.write_table(pa.Table.from_pylist(content), path, row_group_size=3)
    elif isinstance(content, np.ndarray):
        np.save(path, content) if path.suffix == ".npy" else content.tofile(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return path


def _split(data: TokenFile) -> list[np.ndarray]:
    return np.split(data.read(0, data.tokens).tokens, data.bounds()[1:-1])


def _texts(data: TokenFile) -> list[bytes]:
    return [piece.tobytes() for piece in _split(data)]


def _ids(data: TokenFile) -> list[list[int]]:
    return [piece.tolist() for piece in _split(data)]


def _learned(data: TokenFile) -> list[int]:
    """The places of the tokens that are learned."""
    learned = data.read(0, data.tokens).learned
    assert learned is not None
    return np.flatnonzero(learned).tolist()


def _content(document: Document) -> np.ndarray:
    return np.array(document.content if isinstance(document.content, str) else document.content[:])


def _prepare(paths: list[Path], tmp_path: Path, tokenizer: Path | None = None, **options) -> TokenFile:
    prepare(paths, tmp_path / "out", load_tokenizer(tokenizer) if tokenizer else None, **options)
    return open_tokens(tmp_path / "out")


def test_text_as_raw_bytes(tmp_path: Path) -> None:
    content = b"windows\r\n\xfc latin, and an end without a newline"
    data = _prepare([_write(tmp_path / "a.weird", content)], tmp_path)
    assert _texts(data) == [content]


def test_text_by_tokenizer(tmp_path: Path, bpe: Path) -> None:
    text = "the sea\r\nünïcödé 雪"
    tokenizer = load_tokenizer(bpe)
    data = _prepare([_write(tmp_path / "a.txt", text)], tmp_path, bpe)
    assert _ids(data) == [[*tokenizer.encode([text])[0].tolist(), tokenizer.end]]
    assert (data.header.dtype, data.vocab, data.tokenizer) == ("uint16", 300, tokenizer.fingerprint)


def test_end_is_not_doubled(tmp_path: Path, bpe: Path) -> None:
    lines = [{"text": "sea<end>"}, {"prompt": "sea", "completion": ""}, {"tokens": [7]}]
    data = _prepare([_write(tmp_path / "a.jsonl", lines)], tmp_path, bpe)
    sea = load_tokenizer(bpe).encode(["sea"])[0].tolist()
    assert _ids(data) == [[*sea, 0], [*sea, 0], [7]]  # what comes ready is left as it is
    # The prompt of the second document is not learned
    assert _learned(data) == [*range(len(sea) + 1), 2 * len(sea) + 1, 2 * len(sea) + 2]


def test_folder(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for name, content in {"b.txt": "b", "a/z.py": "z", "a/.x": "no", ".git/y": "no", "c": "c", "empty": ""}.items():
        _write(top / name, content)
    _write(top / "picture.png", b"\x89PNG\0")
    _write(top / "model.bin", b"\1\2")  # raw tokens only where --bin-dtype says so
    made = prepare([top], tmp_path / "out")
    assert _texts(open_tokens(tmp_path / "out")) == [b"z", b"b", b"c"]
    assert (len(made.others), made.empty) == (2, 1)


def test_files_and_folders_in_the_order_given(tmp_path: Path) -> None:
    paths = [_write(tmp_path / "z", "1"), _write(tmp_path / "f" / "m", "2").parent, _write(tmp_path / "a", "3")]
    assert _texts(_prepare(paths, tmp_path)) == [b"1", b"2", b"3"]


def test_out_within_the_folder(tmp_path: Path) -> None:
    _write(tmp_path / "a.txt", "abc")
    _write(tmp_path / "out.partial.journal", "not an input")
    assert _texts(_prepare([tmp_path], tmp_path)) == [b"abc"]


RECORDS = [
    {"text": "ü one", "other": 1},
    {"prompt": "ask", "completion": "say"},
    {"prompt": "", "completion": "alone"},
]


def test_jsonl(tmp_path: Path) -> None:
    lines = "\n  \n".join(map(json.dumps, [*RECORDS, {"text": ""}]))
    made = prepare([_write(tmp_path / "a.JSONL", lines + "\n\n")], tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    assert _texts(data) == ["ü one".encode(), b"asksay", b"alone"]
    assert _learned(data) == [*range(6), *range(6 + 3, 6 + 6 + 5)]
    assert made.empty == 1


def test_prompt_and_completion_are_encoded_apart(tmp_path: Path, bpe: Path) -> None:
    data = _prepare([_write(tmp_path / "a.jsonl", [{"prompt": "the se", "completion": "a"}])], tmp_path, bpe)
    prompt, completion, together = (part.tolist() for part in load_tokenizer(bpe).encode(["the se", "a", "the sea"]))
    assert _ids(data) == [[*prompt, *completion, 0]] != [[*together, 0]]
    assert _learned(data) == list(range(len(prompt), data.tokens))


@pytest.mark.parametrize(
    "records",
    [
        [{"text": word} for word in ("one", "two", "three", "four", "five")],
        [{"prompt": word, "completion": "!"} for word in ("one", "two", "three", "four", "five")],
        [{"tokens": list(range(count))} for count in (3, 1, 300, 2)],
    ],
)
def test_parquet_equals_jsonl(tmp_path: Path, records: list[dict]) -> None:
    for ending in ("jsonl", "parquet"):
        prepare([_write(tmp_path / f"a.{ending}", records)], tmp_path / f"{ending}.out")
    assert (tmp_path / "jsonl.out").read_bytes() == (tmp_path / "parquet.out").read_bytes()


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "uint32"), (2**32 - 1, "uint32")]
)
def test_ready_tokens_take_the_smallest_dtype(tmp_path: Path, largest: int, dtype: str) -> None:
    data = _prepare(
        [_write(tmp_path / "a.jsonl", [{"tokens": [5]}, {"tokens": [largest, 0]}, {"tokens": [3]}])], tmp_path
    )
    assert _ids(data) == [[5], [largest, 0], [3]]
    assert (data.header.dtype, data.vocab, data.tokenizer) == (np.dtype(dtype).name, largest + 1, "unknown")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_npy(tmp_path: Path) -> None:
    one = _write(tmp_path / "one.npy", np.array([1, 2, 3], np.int64))
    rows = _write(tmp_path / "rows.npy", np.asfortranarray(np.array([[4, 5], [6, 7]], ">u2")))
    assert _ids(_prepare([one, rows], tmp_path)) == [[1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bin(tmp_path: Path, dtype: str) -> None:
    path = _write(tmp_path / "a.bin", np.array([9, 8, 7, 6], dtype))
    data = _prepare([path], tmp_path, bin_dtype=dtype)
    assert _ids(data) == [[9, 8, 7, 6]]


def test_bin_with_bounds(tmp_path: Path) -> None:
    _write(tmp_path / "f" / "a.bin", np.array([9, 8, 700, 6], np.uint16))
    _write(tmp_path / "f" / "a.bounds.npy", np.array([0, 1, 1, 4]))
    made = prepare([tmp_path / "f"], tmp_path / "out", bin_dtype="uint16")
    assert _ids(open_tokens(tmp_path / "out")) == [[9], [8, 700, 6]]
    assert made.empty == 1


def test_text_with_ready_tokens_of_a_tokenizer(tmp_path: Path, plain_bpe: Path) -> None:
    text, ready = _write(tmp_path / "a.txt", "sea"), _write(tmp_path / "a.npy", np.array([299]))
    data = _prepare([text, ready], tmp_path, plain_bpe)
    assert _ids(data) == [load_tokenizer(plain_bpe).encode(["sea"])[0].tolist(), [299]]


def _from(path: Path, place: Place, bin_dtype: str | None = None) -> list[tuple[Place, Document]]:
    return list(documents(find_inputs([path], bin_dtype).files, place, Reading(raw=True, bin_dtype=bin_dtype)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.npy", "a.bin", "folder"])
def test_reading_goes_on_behind_any_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        for number in range(7):
            _write(path / str(number), f"document {number}")
    elif path.suffix in (".jsonl", ".parquet"):
        _write(path, [{"text": f"document {number}"} for number in range(7)])
    else:
        _write(path, np.arange(14, dtype=np.uint8).reshape(7, 2))
        _write(tmp_path / "a.bounds.npy", np.arange(0, 15, 2)) if name == "a.bin" else None
    whole = _from(path, Place(), "uint8")
    assert len(whole) == 7
    for number, (place, _) in enumerate(whole):
        rest = _from(path, place, "uint8")
        assert [(at, item.where) for at, item in rest] == [(at, item.where) for at, item in whole[number + 1 :]]
        assert all(
            np.array_equal(_content(a), _content(b)) for (_, a), (_, b) in zip(rest, whole[number + 1 :], strict=True)
        )


# A header of version 1 around the shape, which numpy reads as a Python literal
NPY = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i8', 'fortran_order': False, 'shape': %s, }" + b" " * 64


REFUSED = {
    "missing": ("none.txt", None, "none.txt' does not exist: name a file or a folder"),
    "empty file": ("a.txt", "", "a.txt' is empty, 0 bytes"),
    "binary": ("a.exe", b"MZ\0", r"a.exe' is binary, with a zero byte at offset 2: name text"),
    "bad line": ("a.jsonl", '{"text": "a"}\n\n{"text": }', r"a.jsonl', line 3 is not JSON \(Expecting value\)"),
    "no object": ("a.jsonl", "[1]", r"a.jsonl', line 1 is not an object"),
    "no field": ("a.jsonl", '{"txt": "a"}', "line 1 has the fields 'txt': 'text', 'prompt' and 'completion', 'tokens'"),
    "no completion": ("a.jsonl", '{"prompt": "a"}', "line 1 has the fields 'prompt'"),
    "number": ("a.jsonl", '{"text": 5}', "line 1 has a 'text' of type int: text is needed"),
    "surrogate": ("a.jsonl", r'{"text": "a\ud800"}', "line 1 has half a surrogate pair at character 1 of 'text'"),
    "jsonl encoding": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xfc"}',
        r"line 2 is not UTF-8 at byte offset 24 \(0xfc\)",
    ),
    "float token": ("a.jsonl", '{"tokens": [1.5]}', "line 1 has 'tokens' that are not a list of whole numbers"),
    "true token": ("a.jsonl", '{"tokens": [true]}', "line 1 has 'tokens' that are not a list of whole numbers"),
    "negative": ("a.jsonl", '{"tokens": [3, -7]}', "line 1 has token id -7, and ids go from 0 to 4294967295"),
    "large": ("a.jsonl", '{"tokens": [4294967296]}', "line 1 has token id 4294967296, and ids go from 0 to 4294967295"),
    "huge": ("a.jsonl", '{"tokens": [36893488147419103232]}', "line 1 has token id 36893488147419103232"),
    "mixed lines": (
        "a.jsonl",
        '{"text": "a"}\n{"tokens": [1]}',
        "line 2 is ready tokens among text: name the tokenizer",
    ),
    "lines mixed": (
        "a.jsonl",
        '{"tokens": [1]}\n{"text": "a"}',
        "line 2 is text among ready tokens: name the tokenizer",
    ),
    "all empty": ("a.jsonl", '{"text": ""}\n{"text": ""}', "a.jsonl' has no token in its 2 documents"),
    "parquet": ("a.parquet", "text", r"a.parquet' is not Parquet \("),
    "columns": ("a.parquet", [{"txt": "a"}], "a.parquet' has the columns 'txt': 'text', 'prompt' and"),
    "null": ("a.parquet", [{"text": "a"}, {"text": None}], "a.parquet', row 2 has a 'text' of type null"),
    "float": ("a.npy", np.zeros(3, np.float32), "a.npy' holds float32: whole numbers are needed"),
    "bool": ("a.npy", np.zeros(3, bool), "a.npy' holds bool: whole numbers are needed"),
    "object": ("a.npy", np.array([{}], object), r"a.npy' is not a plain .npy file \(.*objects"),
    "3-D": ("a.npy", np.zeros((1, 2, 3), int), r"a.npy' has the shape \[1, 2, 3\]: \[tokens\] or"),
    "no npy": ("a.npy", "text", r"a.npy' is not a plain .npy file \("),
    "a call in npy": ("a.npy", NPY % b"print(1)", r"a.npy' is not a plain .npy file \(malformed node or string.*\d\)"),
    "a shape of true": ("a.npy", NPY % b"(True, 8)", r"a.npy' is not a plain .npy file \("),
    "a shape of 10^30": ("a.npy", NPY % (b"(1" + b"0" * 30 + b",)"), r"a.npy' is not a plain .npy file \("),
    "a header without end": ("a.npy", NPY % b"((((", r"a.npy' is not a plain .npy file \("),
    "negative npy": ("a.npy", np.array([[1], [-1]]), "a.npy', row 1 has token id -1"),
    "nothing in npy": ("a.npy", np.zeros((0, 4), int), "a.npy' has no token in its 0 documents"),
    "bin dtype": ("a.bin", b"abc", "a.bin' holds raw tokens of unknown size: add --bin-dtype uint16"),
}


def test_parquet_that_is_not_text(tmp_path: Path) -> None:
    """Arrow checks no text when it reads, and says what is wrong with a footer on two lines."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}), path)
    with pytest.raises(DataError, match=r"a.parquet' is not Parquet \(.*codec"):
        prepare([path], tmp_path / "out")
    path.write_bytes(b"PAR1" + bytes(20) + b"\x04\0\0\0PAR1")
    with pytest.raises(DataError) as error:
        prepare([path], tmp_path / "out")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    name, content, sentence = REFUSED[kind]
    if content is not None:
        _write(tmp_path / name, content)
    with pytest.raises(DataError, match=sentence) as error:
        prepare([tmp_path / name], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "sprung",)

    np.save(tmp_path / "a.npy", np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"is not a plain .npy file"):
        prepare([tmp_path / "a.npy"], tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


def test_encoding_error_names_the_byte(tmp_path: Path, bpe: Path) -> None:
    path = _write(tmp_path / "a.txt", b"gr\xfc\xdfe")
    with pytest.raises(DataError, match=r"a.txt' is not UTF-8 at byte offset 2 \(0xfc\): .*`iconv -f LATIN1 -t UTF-8`"):
        prepare([path], tmp_path / "out", load_tokenizer(bpe))


def test_bin_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.bin", b"abcde")
    with pytest.raises(DataError, match=r"a.bin' has 5 bytes, not a multiple of the 2 of --bin-dtype uint16"):
        prepare([path], tmp_path / "out", bin_dtype="uint16")
    with pytest.raises(DataError, match="--bin-dtype unit16 is not known: did you mean 'uint16'"):
        prepare([path], tmp_path / "out", bin_dtype="unit16")
    for bounds in ([0, 4], [1, 5], [0, 6, 5], [5]):
        _write(tmp_path / "a.bounds.npy", np.array(bounds))
        with pytest.raises(DataError, match=r"a.bounds.npy' is not a rising list of offsets from 0 to the 5 tokens"):
            prepare([path], tmp_path / "out", bin_dtype="uint8")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "f" / "a.txt", "sea")

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", refuse)  # root, who may run this, may read everything
    with pytest.raises(DataError, match=r"f' cannot be read \(Permission denied\)"):
        prepare([tmp_path / "f"], tmp_path / "out")


def test_no_path() -> None:
    with pytest.raises(DataError, match="no path is given: name a file or a folder"):
        prepare([], Path("out"))


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "f" / "g").mkdir(parents=True)
    with pytest.raises(DataError, match="f' holds no text and no tokens: name a folder"):
        prepare([tmp_path / "f"], tmp_path / "out")
    _write(tmp_path / "f" / "g" / "a.png", b"\0")
    with pytest.raises(DataError, match="f' holds no text and no tokens, only 1 file of other kinds: name"):
        prepare([tmp_path / "f"], tmp_path / "out")


def test_text_with_ready_tokens_of_nobody(tmp_path: Path) -> None:
    text, ready = _write(tmp_path / "a.txt", "sea"), _write(tmp_path / "a.npy", np.array([299]))
    with pytest.raises(DataError, match=r"a.txt' is text and .*a.npy' holds ready tokens: name the tokenizer"):
        prepare([text, ready], tmp_path / "out")


def test_ready_tokens_beyond_the_vocabulary(tmp_path: Path, bpe: Path) -> None:
    path = _write(tmp_path / "a.npy", np.array([3, 300]))
    with pytest.raises(DataError, match=r"a.npy' has token id 300, and ids go from 0 to 299"):
        prepare([path], tmp_path / "out", load_tokenizer(bpe))


def test_no_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a.parquet' needs pyarrow: pip install 'ithaca\[parquet\]'$"):
        prepare([path], tmp_path / "out")
