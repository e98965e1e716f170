"""Read the tensors of a checkpoint by DCP, without running anything that its files say.

DCP pickles its metadata: which tensors there are, and where their parts lie. A pickle runs the functions that it names.
So the names that DCP writes are read as inert stand-ins here, and any other name is an error. The types and sizes that
the stand-ins hold are checked, and DCP's objects are made from them. DCP loads the bytes of a tensor with
`weights_only=True`. It would unpickle entries that are not tensors, so those are refused.

It costs some seconds for a hundred thousand parts. The unpickler in C is three times as fast, but ten hostile bytes
make it allocate 64 GB.
"""

import math
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ithaca.base.errors import RunError, first_line, shown

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_MOST_DIMS = 64  # torch's own limit
_HASHING = (pickle.DICT[0], pickle.EMPTY_SET[0], pickle.ADDITEMS[0], pickle.FROZENSET[0])  # codes that DCP never uses
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


class PlainReader(dcp.FileSystemReader):
    """The files of one checkpoint. Its metadata is read and checked here, once."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._checked = read_metadata(folder)

    def read_metadata(self) -> Metadata:
        """Return the checked metadata. Without the arguments of DCP's method, DCP looks for no other file."""
        return self._checked


def fill(state: dict[str, Any], reader: PlainReader, group: dist.ProcessGroup | None = None) -> None:
    """Read the tensors in `state` in place, each rank its own shards. Without a group: in this process alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as no_dist=True asks for
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as problem:
        inner = next(iter(problem.failures.values()))[0]
        raise RunError(f"the checkpoint '{reader.path}' cannot be read ({first_line(inner)})") from None


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint. Raise RunError if it is anything but what DCP writes of tensors."""
    file = folder / ".metadata"
    try:
        if not file.is_file():
            raise _WrongContentError("it is not a file")
        with file.open("rb") as opened:
            metadata = _metadata(_Unpickler(opened).load())
        missing = {stored.relative_path for stored in metadata.storage_data.values()}
        missing = sorted(name for name in missing if not (folder / name).is_file())
        if missing:
            raise _WrongContentError(f"it names {missing[0]}, which is not a file")
        return metadata
    except _ForeignNameError as problem:
        raise RunError(
            f"'{file}' names {problem}, which a checkpoint never has: the checkpoint is not read, as it could run code"
        ) from None
    except _WrongContentError as problem:
        raise RunError(f"'{file}' is not what a checkpoint has there ({problem}): the checkpoint is not read") from None
    except Exception:  # a pickle can fail in any way
        raise RunError(f"'{file}' is not what a checkpoint has there: the checkpoint is not read") from None


class _WrongContentError(Exception):
    """The pickle holds something that DCP never writes; says what."""


class _ForeignNameError(Exception):
    """The pickle names something that DCP never writes."""


class _Inert:
    """Stands for an object or a function of the pickle: it takes any arguments, keeps its state and does nothing."""

    state: Any = None

    def __new__(cls, *_: object) -> "_Inert":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Inert): ...


class _Tensor(_Inert): ...


class _Properties(_Inert): ...


class _Chunk(_Inert): ...


class _Index(_Inert): ...


class _StorageInfo(_Inert): ...


def _size(numbers: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Stands for torch.Size. A file of a megabyte could ask for many copies of one long list."""
    if len(numbers) > _MOST_DIMS:
        raise _WrongContentError(f"it has a shape of {len(numbers)} numbers")
    return tuple(numbers)


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

# Every name that DCP writes for tensors, with torch from 2.11 and Python from 3.11 on
_STAND_INS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Index,
    (_FILES, "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): _size,
    **{("torch", name.removeprefix("torch.")): name for name in _DTYPES},
    # What is read but not used: the layout, the memory format, the folder that it was written to
    ("torch.serialization", "_get_layout"): _Inert,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Inert,
    ("builtins", "getattr"): _Inert,  # how some releases of Python 3.11 pickle a memory format
    (_METADATA, "StorageMeta"): _Inert,
    ("pathlib", "PosixPath"): _Inert,
    ("pathlib._local", "PosixPath"): _Inert,  # Python 3.13
}


def _with_keys_checked(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Return a method that adds items to a dictionary, with a look at their keys on the stack first."""

    def look_and_load(unpickler: Any) -> None:
        if not all(isinstance(key, str | _Index) for key in unpickler.stack[keys]):
            raise _WrongContentError("it has a key that is neither a name nor an index")
        load(unpickler)

    return look_and_load


_METHODS: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch  # pyrefly: ignore
_ONE, _SEVERAL = pickle.SETITEM[0], pickle.SETITEMS[0]


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python. It makes no sets, and dictionaries only with keys as DCP has them.

    A tuple that holds the same tuple twice, and so on sixty times, takes seventy bytes, and years to hash as a key.
    """

    dispatch: ClassVar = {code: load for code, load in _METHODS.items() if code not in _HASHING} | {
        _ONE: _with_keys_checked(_METHODS[_ONE], slice(-2, -1)),
        _SEVERAL: _with_keys_checked(_METHODS[_SEVERAL], slice(0, None, 2)),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _ForeignNameError(shown(f"{module}.{name}"))
        return _STAND_INS[module, name]


class _Stored(NamedTuple):
    """The place of a tensor's part in a file. DCP reads these names, and no transformation is ever applied."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def _metadata(found: Any) -> Metadata:
    match found:
        case _Metadata(state={"state_dict_metadata": dict(tensors), "storage_data": dict(places)}):
            return Metadata(
                {name: _tensor(name, tensor) for name, tensor in tensors.items()},
                storage_data={_index(index): _stored(place) for index, place in places.items()},
                storage_meta=StorageMeta(),
            )
    raise _WrongContentError("it is not a list of tensors")


def _tensor(name: Any, found: Any) -> TensorStorageMetadata:
    match found:
        case _Tensor(
            state={
                "properties": _Properties(state=(str(dtype), _, _, _, _)),
                "size": tuple(size),
                "chunks": list(chunks),
            }
        ) if isinstance(name, str) and dtype in _DTYPES and _sizes(size):
            parts = [_chunk(name, chunk, size) for chunk in chunks]
            held, whole = sum(math.prod(part.sizes) for part in parts), math.prod(size)
            if held < whole:
                raise _WrongContentError(f"it has {held} of the {whole} elements of {shown(name)}")
            return TensorStorageMetadata(TensorProperties(_DTYPES[dtype]), torch.Size(size), parts)
    raise _WrongContentError(f"its entry {shown(name)} is not a tensor")


def _chunk(name: str, found: Any, size: tuple[int, ...]) -> ChunkStorageMetadata:
    match found:
        case _Chunk(state={"offsets": tuple(offsets), "sizes": tuple(sizes)}) if (
            _sizes(offsets)
            and _sizes(sizes)
            and len(offsets) == len(sizes) == len(size)
            and all(start + count <= whole for start, count, whole in zip(offsets, sizes, size, strict=True))
        ):
            return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    raise _WrongContentError(f"a part of {shown(name)} lies outside of it")


def _index(found: Any) -> MetadataIndex:
    match found:
        case _Index(state={"fqn": str(name), "offset": tuple(offset), "index": int() | None as index}) if _sizes(
            offset
        ):
            return MetadataIndex(name, offset, index)
    raise _WrongContentError("it names a part of no tensor")


def _stored(found: Any) -> _Stored:
    match found:
        case _StorageInfo(state={"relative_path": str(file), "offset": int(offset), "length": int(length), **more}) if (
            not more and offset >= 0 and length >= 0
        ):
            if not _DATA_FILE.fullmatch(file):
                raise _WrongContentError(f"it names the file {shown(file)}")
            return _Stored(file, offset, length)
    raise _WrongContentError("it has a part that lies in no file")


def _sizes(numbers: tuple[Any, ...]) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)
