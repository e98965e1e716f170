"""A run folder from a stranger: nothing that its checkpoint says is run, and sound checkpoints are read as before."""

import builtins
import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ithaca.base.errors import IthacaError, RunError
from ithaca.checkpoint.files import text_sha256
from ithaca.checkpoint.reader import PlainReader, fill
from ithaca.config import Config
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.nursery import Nursery
from tests.train.test_checkpoint import raising

DCP = "torch.distributed.checkpoint"


class Call:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"tR"


def getattr_chain(command: str) -> bytes:
    """os.system from no more than getattr and a class of DCP: how some releases of Python pickle an Enum."""
    look = named("builtins", "getattr")
    made = called(look, named(f"{DCP}.metadata", "MetadataIndex"), text("__init__"))
    found = called(called(look, called(look, made, text("__globals__")), text("get")), text("os"))
    return b"\x80\x04" + called(called(look, found, text("system")), text(command)) + b"."


def inside(metadata: Metadata, **changes: Any) -> bytes:
    """The metadata as it was written, and something more."""
    return pickle.dumps(replace(metadata, **changes))


# A way to run a shell command, given a legitimate metadata -> (the file's bytes, what the error names)
CODE: dict[str, Callable[[str, Metadata], tuple[bytes, str]]] = {
    "os.system": lambda c, _: (pickle.dumps(Call(os.system, c)), "posix.system"),
    "exec": lambda c, _: (pickle.dumps(Call(builtins.exec, f"import os; os.system({c!r})")), "builtins.exec"),
    "getattr": lambda c, _: (getattr_chain(c), ""),
    "a name inside DCP's module": lambda c, _: (
        b"\x80\x04" + called(named(f"{DCP}.filesystem", "os.system"), text(c)) + b".",
        f"{DCP}.filesystem.os.system",
    ),
    "an old opcode": lambda c, _: (b"(" + b"S" + repr(c).encode() + b"\nios\nsystem\n.", "os.system"),
    "torch's storage": lambda c, _: (
        b"\x80\x04"
        + called(named("torch.storage", "_load_from_bytes"), b"B" + packed(saved(Call(os.system, c))))
        + b".",
        "torch.storage._load_from_bytes",
    ),
    "in the planner's data": lambda c, m: (inside(m, planner_data=[Call(os.system, c)]), "posix.system"),
    "in a shape": lambda c, m: (
        inside(m, state_dict_metadata={**m.state_dict_metadata, "more": Call(os.system, c)}),
        "posix.system",
    ),
    "in a place": lambda c, m: (
        inside(m, storage_data={**m.storage_data, MetadataIndex("more"): Call(os.system, c)}),
        "posix.system",
    ),
}


def packed(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def saved(item: object) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(item, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def finished(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on two ranks with one checkpoint."""
    path = tmp_path_factory.mktemp("hostile") / "run"
    short = replace(small_config, train=replace(small_config.train, steps=4))
    assert [end.code for end in nursery.job(train, short, path, ranks=2)] == [0, 0]
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def legitimate(run: Path) -> Metadata:
    return pickle.loads((checkpoint(run) / ".metadata").read_bytes())


def infect(run: Path, content: bytes) -> None:
    """Put other metadata into a checkpoint, with a manifest that agrees."""
    (checkpoint(run) / ".metadata").write_bytes(content)
    manifest = json.loads((checkpoint(run) / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][".metadata"] = [len(content), hashlib.sha256(content).hexdigest()]
    (checkpoint(run) / "manifest.json").write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))


@pytest.mark.parametrize("way", CODE)
def test_no_code_from_metadata(nursery: Nursery, small_config: Config, run: Path, tmp_path: Path, way: str) -> None:
    mark = tmp_path / "mark"
    content, name = CODE[way](f"touch {mark}", legitimate(run))
    pickle.loads(content)
    assert mark.exists(), "this would run code"
    mark.unlink()
    infect(run, content)
    longer = replace(small_config, train=replace(small_config.train, steps=6))
    (exported,) = nursery.job(exporting, run, tmp_path / "out")
    for end in (exported, *nursery.job(raising, longer, run, ranks=2)):
        assert not mark.exists()
        assert end.code == 1
        (line,) = end.err.strip().splitlines()
        assert f"'{checkpoint(run)}/.metadata'" in line
        if name:
            assert f"names '{name}', which a checkpoint never has: the checkpoint is not read" in line
        assert "the checkpoint is not read" in line
    assert not (tmp_path / "out").exists()


def exporting(run: Path, folder: Path) -> None:
    import sys

    try:
        export(run, folder, None)
    except IthacaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)


def first(entries: dict[Any, Any]) -> Any:
    return next(iter(entries.values()))


def altered(change: Callable[[Metadata], Any]) -> Callable[[Metadata], bytes]:
    def dump(metadata: Metadata) -> bytes:
        change(metadata)
        return pickle.dumps(metadata)

    return dump


def put(owner: Any, name: str, value: Any) -> None:
    owner.__dict__[name] = value


# Metadata that names nothing foreign, but is not what DCP writes -> what the error says
WRONG: dict[str, tuple[Callable[[Metadata], bytes], str]] = {
    "bytes, which DCP unpickles": (
        altered(lambda m: m.state_dict_metadata.update({"weight/x": BytesStorageMetadata()})),
        f"names '{DCP}.metadata.BytesStorageMetadata', which a checkpoint never has",
    ),
    "a file of another folder": (
        altered(lambda m: put(first(m.storage_data), "relative_path", "../../../secret")),
        "it names the file '../../../secret'",
    ),
    "an absolute file": (altered(lambda m: put(first(m.storage_data), "relative_path", "/dev/zero")), "'/dev/zero'"),
    "a file that is not there": (
        altered(lambda m: put(first(m.storage_data), "relative_path", "__9_9.distcp")),
        "it names __9_9.distcp, which is not a file",
    ),
    "a transformation": (
        altered(lambda m: put(first(m.storage_data), "transform_descriptors", ["zstd"])),
        "lies in no file",
    ),
    "a negative offset": (altered(lambda m: put(first(m.storage_data), "offset", -1)), "lies in no file"),
    "a place of another type": (altered(lambda m: put(first(m.storage_data), "length", "9")), "lies in no file"),
    "a part too few": (
        altered(lambda m: first(m.state_dict_metadata).chunks.pop()),
        "it has 6144 of the 12288 elements of",
    ),
    "a part outside": (
        altered(lambda m: put(first(m.state_dict_metadata).chunks[0], "offsets", torch.Size((999, 0)))),
        "lies outside of it",
    ),
    "a shape of texts": (altered(lambda m: put(first(m.state_dict_metadata), "size", ("a", 2))), "is not a tensor"),
    "another dtype": (
        altered(lambda m: put(first(m.state_dict_metadata).properties, "dtype", torch.qint8)),
        "names 'torch.qint8', which a checkpoint never has",
    ),
    "no tensors": (altered(lambda m: put(m, "state_dict_metadata", [1])), "it is not a list of tensors"),
    "another object": (lambda m: pickle.dumps(m.storage_data), "it is not a list of tensors"),
    "a number": (lambda _: pickle.dumps(7), "it is not a list of tensors"),
    "nothing": (lambda _: b"", "is not what a checkpoint has there"),
    "half of it": (lambda m: pickle.dumps(m)[:-99], "is not what a checkpoint has there"),
    "noise": (lambda _: bytes(range(256)), "is not what a checkpoint has there"),
    "a class that is changed": (
        lambda _: b"\x80\x04" + named(f"{DCP}.metadata", "MetadataIndex") + b"N}X\x03\0\0\0fqnK\x01s\x86b.",
        "is not what a checkpoint has there",
    ),
    "a name with an escape sequence": (
        lambda _: b"\x80\x04" + named("\x1b[2J\nos", "system") + b".",
        r"names '\x1b[2J\nos.system', which",
    ),
    "a persistent id": (lambda _: b"\x80\x04Pid\n.", "is not what a checkpoint has there"),
    "a key that takes years to hash": (lambda _: b"\x80\x04})" + 60 * b"2\x86" + b"K\x01s.", "it has a key that is"),
    "keys that take years to hash": (
        lambda _: b"\x80\x04}(" + text("a") + b"K\x01)" + 60 * b"2\x86" + b"K\x01u.",
        "it has a key that is neither a name nor an index",
    ),
    "another way to make a dictionary": (
        lambda _: b"\x80\x04()" + 60 * b"2\x86" + b"K\x01d.",
        "is not read",
    ),
    "a set of it": (lambda _: b"\x80\x04\x8f()" + 60 * b"2\x86" + b"\x90.", "is not read"),
    "a frozen set of it": (lambda _: b"\x80\x04()" + 60 * b"2\x86" + b"\x91.", "is not read"),
    "a shape that is copied again and again": (
        lambda _: b"\x80\x04](" + 65 * b"K\x01" + b"e\x94" + named("torch", "Size") + b"h\0\x85R.",
        "it has a shape of 65 numbers",
    ),
}


@pytest.mark.parametrize("way", WRONG)
def test_metadata_that_dcp_does_not_write(run: Path, way: str) -> None:
    make, sentence = WRONG[way]
    infect(run, make(legitimate(run)))
    with pytest.raises(RunError) as caught:
        PlainReader(checkpoint(run))
    assert sentence in str(caught.value)
    assert "the checkpoint is not read" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not hasattr(MetadataIndex, "fqn")


def test_ten_bytes_take_no_memory(run: Path) -> None:
    """A memo of four billion entries: torch's way of reading makes room for them first."""
    import resource

    infect(run, b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        with pytest.raises(RunError, match="it is not a list of tensors"):
            PlainReader(checkpoint(run))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_tensor_that_would_run_code(run: Path, tmp_path: Path) -> None:
    """The bytes of a tensor are loaded as tensors only, and the error is a sentence."""
    mark, metadata = tmp_path / "mark", legitimate(run)
    content = saved(Call(os.system, f"touch {mark}"))
    (checkpoint(run) / "__7_0.distcp").write_bytes(content)
    for place in metadata.storage_data.values():
        place.relative_path, place.offset, place.length = "__7_0.distcp", 0, len(content)
    infect(run, pickle.dumps(metadata))
    name, tensor = next(iter(metadata.state_dict_metadata.items()))
    with pytest.raises(RunError, match="step-00000004' cannot be read") as caught:
        fill({name: torch.empty(tensor.size)}, PlainReader(checkpoint(run)))
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_metadata_of_pythons_that_pickle_an_enum_by_getattr(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of Python 3.11 do. The checkpoint is read, by the stand-in for getattr."""
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    content = pickle.dumps(legitimate(run))
    assert b"getattr" in content
    infect(run, content)
    assert PlainReader(checkpoint(run)).read_metadata().state_dict_metadata


def test_a_checkpoint_of_torch_2_11() -> None:
    """Written by torch 2.11 and Python 3.12: checkpoints outlive the torch that wrote them."""
    weight, moment = torch.zeros(3, 4), torch.zeros(2, dtype=torch.bfloat16)
    folder = Path(__file__).with_name("checkpoint-torch-2.11")
    fill({"weight/a": weight, "exp_avg/b": moment}, PlainReader(folder))
    assert torch.equal(weight, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(moment, torch.ones(2, dtype=torch.bfloat16))


def edit(**changes: object) -> Callable[[Path], object]:
    return lambda model: (model / "config.json").write_text(
        json.dumps({**json.loads((model / "config.json").read_text()), **changes})
    )


def link(name: str, target: str) -> Callable[[Path], object]:
    return lambda model: ((model / name).unlink(missing_ok=True), (model / name).symlink_to(target))


# What may be wrong with the description of the model in a run folder
MODEL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tokenizer elsewhere": (link("tokenizer.json", "/etc/passwd"), "as a link to '/etc/passwd', outside"),
    "a config elsewhere": (link("config.json", "/etc/passwd"), "as a link to '/etc/passwd', outside"),
    "no dtypes": (lambda m: (m / "dtypes.json").unlink(), "is not a model folder: dtypes.json is missing"),
    "half the dtypes": (lambda m: (m / "dtypes.json").write_text("{"), "dtypes.json' cannot be read as JSON"),
    "other dtypes": (lambda m: (m / "dtypes.json").write_text("{}"), "has 0 weights for the 14 of config.json"),
    "yarn with a base of 1": (
        edit(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
        "rope_theta as 1.0: rope type 'yarn' needs a number above 1",
    ),
}


@pytest.mark.parametrize("way", MODEL)
def test_the_model_of_a_run(nursery: Nursery, small_config: Config, run: Path, tmp_path: Path, way: str) -> None:
    change, sentence = MODEL[way]
    change(run / "model")
    longer = replace(small_config, train=replace(small_config.train, steps=6))
    (exported,) = nursery.job(exporting, run, tmp_path / "out")
    for end in (exported, *nursery.job(raising, longer, run, ranks=2)):
        assert end.code == 2, end.err
        (line,) = end.err.strip().splitlines()
        assert sentence in line
    assert not (tmp_path / "out").exists()


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(run).read_metrics()]


def test_sound_checkpoints_are_read(nursery: Nursery, small_config: Config, run: Path, tmp_path: Path) -> None:
    """Of 2, 3 and 1 ranks, each on another number of ranks, and by export: the numbers of DCP's own reader."""
    for steps, ranks, copies in ((6, 3, 1), (8, 1, 1), (10, 2, 2), (12, 4, 2)):
        mesh = replace(small_config.mesh, replicate=copies)
        config = replace(small_config, train=replace(small_config.train, steps=steps), mesh=mesh)
        ends = nursery.job(train, config, run, ranks=ranks)
        assert [end.code for end in ends] == [0] * ranks, ends[0].err
        assert len(losses(run)) == steps
        (newest,) = (run / "checkpoints").glob(f"step-{steps:08d}")
        ours = PlainReader(newest)
        described = ours.read_metadata().state_dict_metadata
        assert described == dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
        for name, tensor in described.items():
            found, wanted = (torch.full(tensor.size, torch.nan) for _ in range(2))
            fill({name: found}, ours)
            dcp.load({name: wanted}, checkpoint_id=newest, no_dist=True)
            assert torch.equal(found, wanted), name
        assert nursery.job(export, run, tmp_path / f"out{steps}", None)[0].code == 0
