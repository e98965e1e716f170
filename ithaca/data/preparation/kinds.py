"""What a file is, by its name and its first bytes: which reader takes it, or why none does.

Text is whatever has no other kind: prose, source code, HTML. A file that is certainly something else (an archive, a
pickle, an office document, a table) is never read as text. Its reason names a way out. Cost: one read of 8 KiB a file.
"""

import codecs
import re
from pathlib import Path

from ithaca.data.preparation.streams import opened
from ithaca.data.tokenfile import MAGIC

TEXTS = ("text", "jsonl", "json")
PACKED = {".gz": "gzip", ".zst": "zstd"}
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".npy": "npy",
    ".bin": "bin",
}
_PROBED_BYTES = 8192
_ARCHIVE = "is an archive: unpack it and name the files"
_PICKLE = "is a pickle, which could run code: write its texts to a .jsonl or .parquet file"
_OFFICE = "is a document with a layout: convert it to text first"
_WEIGHTS = "holds weights or arrays: name text, .jsonl, .parquet, .arrow, .npy or .bin files"
_TABLE = "is a table: write it as .jsonl or .parquet, as pandas.read_csv(…).to_parquet(…) does"
_REFUSED = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".lz4", ".whl", ".jar"), _ARCHIVE),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".pyc"), _PICKLE),
    **dict.fromkeys((".docx", ".doc", ".odt", ".pdf", ".epub", ".xlsx", ".xls", ".pptx", ".ppt"), _OFFICE),
    **dict.fromkeys((".safetensors", ".gguf", ".h5", ".hdf5", ".npz", ".onnx"), _WEIGHTS),
    **dict.fromkeys((".csv", ".tsv"), _TABLE),
}
_SIGNATURES = {
    b"\x1f\x8b": "is packed by gzip: give it a name that ends with .gz",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: give it a name that ends with .zst",
    b"PK\x03\x04": _ARCHIVE,
    b"7z\xbc\xaf": _ARCHIVE,
    b"\xfd7zXZ": _ARCHIVE,
    b"BZh": _ARCHIVE,
    b"%PDF-": _OFFICE,
    b"{\\rtf": _OFFICE,
    b"PAR1": "is Parquet: give it a name that ends with .parquet",
    b"ARROW1": "is Arrow: give it a name that ends with .arrow",
    b"\x93NUMPY": "is a NumPy array: give it a name that ends with .npy",
    b"\x80\x04\x95": _PICKLE,
    b"\x80\x05\x95": _PICKLE,
    MAGIC: "is a token file already: name it in data.source",
}
_WIDE = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_LIST = re.compile(rb"\s*\[\s*(\{|\]|$)")


def kind_of(path: Path) -> tuple[str, str | None]:
    """Return the kind of a file and how it is packed, by its name."""
    packed = PACKED.get(path.suffix.lower())
    inner = path.with_suffix("") if packed else path
    return _KINDS.get(inner.suffix.lower(), "text"), packed


def refusal(path: Path) -> str | None:
    """Return why a file is not read: the rest of a sentence that begins with its name. None if it is."""
    kind, packed = kind_of(path)
    inner = path.with_suffix("") if packed else path
    if inner.suffix.lower() in _REFUSED:
        return _REFUSED[inner.suffix.lower()]
    if packed and kind not in TEXTS:
        return f"is {kind} packed by {packed}: unpack it first"
    if kind not in TEXTS:
        return None
    with opened(path, packed) as stream:
        return _refused_content(stream.read(_PROBED_BYTES), kind)


def _refused_content(head: bytes, kind: str) -> str | None:
    for mark, name in _WIDE.items():
        if head.startswith(mark):
            return f"is {name}: convert it with `iconv -f {name} -t UTF-8`"
    if kind == "text":
        known = next((reason for mark, reason in _SIGNATURES.items() if head.startswith(mark)), None)
        zero = head.find(b"\0")
        binary = f"is binary, with a zero byte at offset {zero}: name text in UTF-8, or .jsonl, .parquet, .arrow, "
        return known or (binary + ".npy or .bin files" if zero >= 0 else None)
    if kind == "json" and not _LIST.match(head.removeprefix(codecs.BOM_UTF8)):
        return 'is not a list of objects: write [{"text": …}, …], or one object a line in a file named .jsonl'
    return None
