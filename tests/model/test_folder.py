"""Model folders from a stranger: links, names and JSON. What may not be opened is refused with one sentence."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.errors import DataError, ModelError
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.model import folder as folders
from ithaca.model.folder import companions, model_file, read_json
from ithaca.model.source import DTYPES_FILE, describe_model, load_model
from tests.model.test_source import edit_json, split
from tests.models import make_model, save

TOKENIZER = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
SECRET = "a private file"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer; `elsewhere` beside it holds what it may not reach."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.json").write_text(SECRET)
    made = save(make_model("llama3"), tmp_path / "in")
    (made / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return made


def link(name: str, target: str) -> Change:
    """Put a link in the place of a file."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def moved(name: str) -> Change:
    """Move a file out of the folder, and leave a link to it."""

    def make(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere" / name)
        (folder / name).symlink_to(folder.parent / "elsewhere" / name)

    return make


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def pipe(name: str) -> Change:
    return lambda f: ((f / name).unlink(missing_ok=True), os.mkfifo(f / name))


def listening(name: str) -> Change:
    def make(folder: Path) -> None:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket has at most 108 characters
        try:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(name)
        finally:
            os.chdir(here)

    return make


REFUSED: dict[str, tuple[Change, str]] = {
    "config elsewhere": (moved("config.json"), "'config.json' as a link to '.*elsewhere/config.json', outside"),
    "weights elsewhere": (moved("model.safetensors"), "'model.safetensors' as a link to .* outside of the folder"),
    "tokenizer elsewhere": (link("tokenizer.json", "../elsewhere/secret.json"), "put a copy in its place"),
    "tokenizer of the system": (link("tokenizer.json", "/etc/passwd"), "as a link to '/etc/passwd', outside"),
    "a shard elsewhere": (
        lambda f: moved(split(f)[1].name)(f),
        "'model-00002-of-.*' as a link to .* outside of the folder",
    ),
    "an index elsewhere": (
        lambda f: (split(f), moved("model.safetensors.index.json")(f)),
        "'model.safetensors.index.json' as a link to",
    ),
    "a chain of links": (
        both(link("b_token.json", "/etc/passwd"), link("tokenizer.json", "b_token.json")),
        "as a link to '/etc/passwd', outside",
    ),
    "a folder of templates elsewhere": (
        link("additional_chat_templates", "../elsewhere"),
        "'additional_chat_templates' as a link to '.*elsewhere', outside",
    ),
    "a template elsewhere": (
        both(
            lambda f: (f / "additional_chat_templates").mkdir(),
            link("additional_chat_templates/a.jinja", "/etc/passwd"),
        ),
        "'additional_chat_templates/a.jinja' as a link to '/etc/passwd'",
    ),
    "a folder that only looks the same": (
        both(
            lambda f: (f.parent / "in2").mkdir(), lambda f: (f.parent / "in2" / "x").touch(), link("vocab", "../in2/x")
        ),
        "'vocab' as a link to .*in2/x', outside",
    ),
    "a loop": (
        both(link("vocab.a", "vocab.b"), link("vocab.b", "vocab.a")),
        "'vocab.a' as a link that cannot be followed",
    ),
    "a loop of the config": (link("config.json", "config.json"), "'config.json' as a link that cannot be followed"),
    "a dangling link": (link("tokenizer.json", "gone.json"), "'tokenizer.json' as a link that cannot be followed"),
    "a pipe": (pipe("config.json"), "'config.json' as a named pipe: a regular file is needed"),
    "weights in a pipe": (pipe("model.safetensors"), "'model.safetensors' as a named pipe"),
    "a tokenizer in a pipe": (pipe("tokenizer.json"), "'tokenizer.json' as a named pipe"),
    "a link to a pipe": (both(pipe("pipe"), link("tokenizer.json", "pipe")), "'tokenizer.json' as a named pipe"),
    "a device": (link("config.json", "/dev/zero"), "'config.json' as a link to '/dev/zero', outside"),
    "a socket": (listening("vocab"), "'vocab' as a device or socket"),
    "a folder": (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "'config.json' as a folder"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_files_that_are_not_opened(folder: Path, tmp_path: Path, way: str) -> None:
    """When the model is opened, and when its files are copied: nothing of them reaches another folder."""
    source = load_model(folder, "float32")
    change, sentence = REFUSED[way]
    change(folder)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    if companions_refused(folder):
        model = ithaca.apply(source, ithaca.Plan(), ithaca.mesh(device="cpu"))
        with pytest.raises(ModelError, match=sentence):
            ithaca.save_model(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def companions_refused(folder: Path) -> bool:
    try:
        companions(folder)
    except ModelError:
        return (folder / "model.safetensors").is_file()
    return False


def cached(folder: Path) -> Path:
    """The same model as a snapshot in a Hugging Face cache: each file is a link into `blobs`."""
    repository = folder.parent / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "1234abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


@pytest.mark.parametrize("place", ["as it is", "through a link", "from within"])
def test_a_snapshot_of_a_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    snapshot = cached(folder)
    if place == "through a link":
        (tmp_path / "link").symlink_to(snapshot)
        snapshot = tmp_path / "link"
    elif place == "from within":
        monkeypatch.chdir(snapshot)
        snapshot = Path()
    model = ithaca.apply(load_model(snapshot, "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    assert load_tokenizer(snapshot).vocab == load_tokenizer(snapshot / "tokenizer.json").vocab == 1
    ithaca.save_model(model, tmp_path / "out")
    written = tmp_path / "out" / "tokenizer.json"
    assert not written.is_symlink()
    assert json.loads(written.read_text()) == TOKENIZER


def test_a_snapshot_that_leaves_its_repository(folder: Path) -> None:
    snapshot = cached(folder)
    other = snapshot.parents[2] / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_text("{}")
    link("config.json", str(other / "0"))(snapshot)
    with pytest.raises(ModelError, match="outside of the folder"):
        load_model(snapshot)
    blobs = snapshot.parents[1] / "blobs"
    (blobs / "x").symlink_to("/etc/passwd")
    link("config.json", "../../blobs/x")(snapshot)
    with pytest.raises(ModelError, match=r"'config.json' as a link to '/etc/passwd', outside"):
        load_model(snapshot)


def test_links_within_a_folder(folder: Path, tmp_path: Path) -> None:
    """Also into a folder of its own, through a chain, and where the folder itself is reached through a link."""
    (folder / "files").mkdir()
    (folder / "tokenizer.json").rename(folder / "files" / "tokenizer.json")
    link("chain", "files/tokenizer.json")(folder)
    link("tokenizer.json", "chain")(folder)
    (tmp_path / "link").symlink_to(folder)
    model = ithaca.apply(load_model(tmp_path / "link", "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))
    ithaca.save_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == TOKENIZER


def test_the_tokenizer_of_a_folder(folder: Path, tmp_path: Path) -> None:
    link("tokenizer_config.json", "/etc/passwd")(folder)
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(ModelError, match=r"'tokenizer_config.json' as a link to '/etc/passwd'"):
            load_tokenizer(path)
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "named").symlink_to(folder / "tokenizer.json")  # whoever names a link means what it leads to
    assert load_tokenizer(tmp_path / "named").vocab == 1
    moved("tokenizer.json")(folder)
    with pytest.raises(ModelError, match=r"'tokenizer.json' as a link to"):
        load_tokenizer(folder)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe' is not a regular file"):
        load_tokenizer(tmp_path / "pipe")
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(Path("n" * 300))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("n" * 300, "has no file 'nnn.*' that can be opened \\(File name too long\\)"),
        ("a\0b", r"has no file 'a\\x00b' that can be opened \(.*null byte"),
        ("\ud800.safetensors", r"has no file '\\ud800.safetensors' that can be opened \(.*surrogates"),
        ("", "weight_map names ''"),
        (".", "weight_map names '.'"),
        ("..", "weight_map names '..'"),
        ("../in/model.safetensors", "weight_map names '../in/model.safetensors'"),
        ("/etc/passwd", "weight_map names '/etc/passwd'"),
        ("files/", "weight_map names 'files/'"),
        ("files", "holds 'files' as a folder: a regular file is needed"),
        ("a\nb\x1b[2J", r"lacks 'a\\nb\\x1b\[2J', one of the"),
        (None, "weight_map names None"),
        (5, "weight_map names 5"),
        (["a"], "weight_map names \\['a'\\]"),
    ],
)
def test_names_in_an_index(folder: Path, name: object, sentence: str) -> None:
    split(folder)
    (folder / "files").mkdir()
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**weight_map, "model.norm.weight": name})
    with pytest.raises(ModelError, match=sentence) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_name_of_a_model_that_the_system_refuses() -> None:
    for name in ("n" * 5000, "a\0b"):
        with pytest.raises(ModelError, match="is neither a folder nor a preset"):
            load_model(name)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xef\xbb\xbf{}", "cannot be read as JSON .*BOM"),
        (b'{"a": 1, "b": 2, "a": 1}', "it has the key 'a' twice"),
        (b'{"x": [{"deep": 1, "deep": 2}]}', "it has the key 'deep' twice"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as JSON .*5000"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b"null", "holds null, not a JSON object"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=sentence) as caught:
        read_json(tmp_path, "config.json")
    assert "\n" not in str(caught.value)


def test_json_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # no bytes on disk
    with pytest.raises(ModelError, match=f"it has {1 << 40} bytes, and {32 << 20} are the most"):
        load_model(tmp_path)
    monkeypatch.setattr(folders, "JSON_BYTES", 10)
    (tmp_path / "config.json").write_bytes(b'{"a": 123}')
    assert read_json(tmp_path, "config.json") == {"a": 123}
    (tmp_path / "config.json").write_bytes(b'{"a": 1234}')
    with pytest.raises(ModelError, match="it has 11 bytes, and 10 are the most"):
        read_json(tmp_path, "config.json")


def test_a_file_that_grows_while_it_is_read() -> None:
    """A file of the kernel says that it is empty."""
    with pytest.raises(ModelError, match="it has 6 bytes, and 5 are the most"):
        folders.read_bytes(Path("/proc/self/status"), 5)


def test_no_file(tmp_path: Path) -> None:
    assert model_file(tmp_path, "config.json") is None
    assert model_file(tmp_path / "missing", "config.json") is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda d: d.pop("model.norm.weight"),
            "has 29 weights for the 30 of config.json: 'model.norm.weight' is missing",
        ),
        (lambda d: d.update(more="float32"), "has 31 weights for the 30 of config.json: 'more' is none of them"),
        (lambda d: d.update({"model.norm.weight": "qint8"}), "model.norm.weight as 'qint8': one of bfloat16, float16"),
        (lambda d: d.update({"model.norm.weight": "os"}), "model.norm.weight as 'os': one of"),
        (lambda d: d.update({"model.norm.weight": "torch.float32"}), "as 'torch.float32': one of"),
        (lambda d: d.update({"model.norm.weight": None}), "as None: one of"),
        (lambda d: d.update({"model.norm.weight": ["float32"]}), "as \\['float32'\\]: one of"),
    ],
)
def test_dtypes_of_a_run(folder: Path, change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    dtypes = dict.fromkeys((name for name, _ in load_model(folder).spec.shapes()), "bfloat16")
    (folder / DTYPES_FILE).write_text(json.dumps(dtypes))
    assert describe_model(folder).weights.stored_dtype("model.norm.weight") == torch.bfloat16
    change(dtypes)
    (folder / DTYPES_FILE).write_text(json.dumps(dtypes))
    with pytest.raises(ModelError, match=sentence):
        describe_model(folder)
