"""`ithaca export`: the bits of `save_model`, in the memory of one file."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.errors import ModelError, RunError
from ithaca.checkpoint import reader
from ithaca.config import Config
from ithaca.model import save as saving
from ithaca.train.folder.export import export
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Nursery


def train_and_save(config: Config, path: Path, folder: Path) -> None:
    """Train, and write the trained model by `save_model` as well."""
    conclude = TrainingRun._conclude

    def conclude_and_save(run: TrainingRun, stopped: bool) -> None:
        ithaca.save_model(run.model, folder)
        conclude(run, stopped)

    TrainingRun._conclude = conclude_and_save
    train(config, path)


@pytest.fixture(scope="module")
def trained(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on two ranks, `run`, and its model by `save_model`, `saved`."""
    folder = tmp_path_factory.mktemp("export")
    source = make_model("qwen3", torch.bfloat16, vocab_size=256, num_hidden_layers=6, tie_word_embeddings=True)
    model = replace(small_config.model, source=str(save(source, folder / "in")))
    config = replace(small_config, model=model, train=replace(small_config.train, steps=2))
    for end in nursery.job(train_and_save, config, folder / "run", folder / "saved", ranks=2):
        assert end.code == 0, end.err
    return folder


def test_the_bits_of_save_model(nursery: Nursery, trained: Path, tmp_path: Path) -> None:
    (end,) = nursery.job(export, trained / "run", tmp_path / "out", None)
    assert (end.code, end.err) == (0, "")
    names = sorted(file.name for file in (trained / "saved").iterdir())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (trained / "saved" / name).read_bytes(), name


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measured_export(run: Path, folder: Path, file_bytes: int) -> None:
    """Export into small files; print the most bytes of tensors that were alive at a time."""
    saving.FILE_BYTES = file_bytes
    before, peak = live_bytes(), 0

    def measure(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal peak
            result = work(*args, **kwargs)
            peak = max(peak, live_bytes() - before)
            return result

        return wrapped

    reader.dcp.load = measure(reader.dcp.load)
    saving.save_file = measure(saving.save_file)
    export(run, folder, None)
    print(peak, flush=True)


def test_memory_is_bounded_by_a_file(nursery: Nursery, trained: Path, tmp_path: Path) -> None:
    spec = ithaca.load_model(trained / "saved").spec
    sizes = [4 * torch.Size(shape).numel() for _, shape in spec.shapes()]  # in fp32, as checkpoints hold them
    file_bytes = max(sizes)
    (end,) = nursery.job(measured_export, trained / "run", tmp_path / "out", file_bytes)
    assert end.code == 0, end.err
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert 0 < int(end.out) <= file_bytes + 2 * max(sizes) < sum(sizes) / 2


def test_a_dtype_that_does_not_exist(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dtype 'bfloat61' is not supported: did you mean 'bfloat16'"):
        export(trained / "run", tmp_path / "out", "bfloat61")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_no_folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ithaca.model.save._write_files", fail)
    with pytest.raises(RunError, match=r"could not be written \(No space left on device; it takes .* and .* are free"):
        export(trained / "run", tmp_path / "a" / "b" / "out", None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_loop_of_links(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelError, match="loop'"):
        export(trained / "run", tmp_path / "loop", None)
    assert (tmp_path / "loop").is_symlink()
