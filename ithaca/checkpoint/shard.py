"""A rank's shard of a whole tensor, and the way in which DCP sees it.

DCP knows DTensors, whose shards follow from a mesh. Tensor ranks cut weights by heads and features, unevenly if need
be, and FSDP2 cuts their parts again. What a rank then holds is a rectangle of the whole tensor, which is all that DCP
has to know: it writes rectangles, one of those that are equal, and fills others from any that overlap with them. So a
checkpoint does not depend on the mesh that wrote it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Shard:
    """A rectangle of a whole tensor."""

    local: Tensor
    offsets: tuple[int, ...]  # where it begins
    shape: torch.Size  # of the whole tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def whole_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def for_dcp(state: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The shards' memory, as tensors that DCP can save and fill."""
    found: dict[str, Tensor] = {}
    for name, shard in state.items():
        tensor = shard.local.detach().as_subclass(_Rectangle)
        tensor.shard = shard
        found[name] = tensor
    return found


class _Rectangle(Tensor):
    """The methods that DCP asks a tensor for (torch.distributed._checkpointable)."""

    shard: Shard

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole tensor, which DCP compares with the size on disk."""
        return self.shard.shape if dim is None else self.shard.shape[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        local = self.shard.local
        return [ChunkStorageMetadata(torch.Size(self.shard.offsets), local.shape)] if local.numel() else []

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.shard.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shard.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.shard.local.detach()
