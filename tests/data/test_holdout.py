"""Documents held out of a token file: both views against documents cut by hand."""

from itertools import pairwise

import numpy as np
import pytest

from ithaca.base.errors import DataError
from ithaca.data import subset
from ithaca.data.holdout import hold_out
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.sample import sequences
from ithaca.data.subset import concatenated

BLOCK = 65536


def made(documents: int, longest: int, masked: bool = False, seed: int = 0) -> TokenFile:
    """Documents of random lengths; every token of document n is n."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, documents)
    tokens = np.repeat(np.arange(documents), lengths).astype(np.uint32)
    learned = generator.random(len(tokens)) < 0.6 if masked else None
    return in_memory(tokens, np.append(0, np.cumsum(lengths)), learned)


def cut(data: TokenFile) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Each document's tokens and mask."""
    window, bounds = data.read(0, data.tokens), data.bounds()
    spans = [slice(*pair) for pair in pairwise(bounds.tolist())]
    return [(window.tokens[span], None if window.learned is None else window.learned[span]) for span in spans]


def labels_of(documents: list[tuple[np.ndarray, np.ndarray | None]]) -> int:
    return sum(len(tokens) - 1 if learned is None else int(learned[1:].sum()) for tokens, learned in documents)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("count", "longest", "share"), [(2, 5, 0.5), (7, 3, 0.3), (60, 9000, 0.1), (900, 40, 0.02)])
def test_both_views(count: int, longest: int, share: float, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subset, "READ", 1000)
    data = made(count, longest, masked)
    every = cut(data)
    views = hold_out(data, share)
    numbers = [[int(tokens[0]) for tokens, _ in cut(view)] for view in views]
    assert sorted(numbers[0] + numbers[1]) == list(range(count))  # each document is on one side, whole
    assert len(numbers[1]) == max(round(share * count), 1)
    for view, own in zip(views, numbers, strict=True):
        assert own == sorted(own)
        assert (view.documents, view.tokens) == (len(own), sum(len(every[number][0]) for number in own))
        assert (view.vocab, view.tokenizer, view.path) == (data.vocab, data.tokenizer, data.path)
        for (tokens, learned), number in zip(cut(view), own, strict=True):
            assert np.array_equal(tokens, every[number][0])
            assert masked == (learned is not None)
            assert learned is None or np.array_equal(learned, every[number][1])
        assert view.header.labels == labels_of(cut(view))


def test_any_window_is_part_of_the_whole() -> None:
    for view in hold_out(made(50, 9000, masked=True), 0.4):
        whole = view.read(0, view.tokens)
        assert view.tokens > BLOCK
        assert np.array_equal(np.unique(whole.documents), np.arange(view.documents))
        generator = np.random.default_rng(1)
        for start, stop in np.sort(generator.integers(0, view.tokens, (200, 2)), axis=1):
            found = view.read(int(start), int(stop) + 1)
            for mine, all_of_it in zip(vars(found).values(), vars(whole).values(), strict=True):
                assert np.array_equal(mine, all_of_it[start : stop + 1])


def test_no_held_out_document_is_ever_drawn() -> None:
    training, held = hold_out(made(90, 30), 0.2)
    forbidden = {int(number) for number in held.read(0, held.tokens).tokens}
    drawn = set()
    for step in range(200):
        drawn |= set(sequences(training, 4, 64, seed=3, step=step)[0].flatten().tolist())
    assert len(forbidden) == 18
    assert drawn == set(range(90)) - forbidden


def test_the_choice_depends_on_the_number_alone() -> None:
    """Pinned: another choice would train on what the checkpoints of older runs were validated on."""
    held = [hold_out(made(40, longest, seed=longest), 0.1)[1] for longest in (1, 9, 50)]
    assert [view.read(0, view.tokens).tokens[view.bounds()[:-1]].tolist() for view in held] == 3 * [PINNED]


PINNED = [3, 4, 9, 10]


def test_identities() -> None:
    data = made(40, 9)
    found = [view.identity()["sha256"] for share in (0.1, 0.1, 0.15) for view in hold_out(data, share)]
    assert found[0:2] == found[2:4]
    assert len(set(found)) == 4
    assert data.identity()["sha256"] not in found
    other = hold_out(made(40, 9, seed=1), 0.1)[0].identity()
    assert other["sha256"] != found[0]


@pytest.mark.parametrize(
    ("documents", "share", "words"),
    [
        (1, 0.02, "has 1 document, and data.validation=0.02 would hold out 1, which leaves none to train on: name a"),
        (2, 0.9, "has 2 documents, and data.validation=0.9 would hold out 2, .* 0.5 holds out one"),
    ],
)
def test_one_document_must_be_left(documents: int, share: float, words: str) -> None:
    with pytest.raises(DataError, match=words):
        hold_out(made(documents, 9), share)


@pytest.mark.parametrize("masked", [(False, False, False), (True, False, True)])
def test_files_one_after_the_other(masked: tuple[bool, ...]) -> None:
    """Held-out documents of a mixture: every window, bound, label and document number of the files in turn."""
    files = [made(30, 40, mask, seed) for seed, mask in enumerate(masked)]
    both = concatenated([hold_out(data, 0.3)[1] for data in files])
    every = [document for data in files for document in cut(hold_out(data, 0.3)[1])]
    assert both.documents == len(every)
    assert both.header.labels == labels_of(every)
    for (tokens, learned), (wanted, mask) in zip(cut(both), every, strict=True):
        assert np.array_equal(tokens, wanted)
        assert (learned is not None) == any(masked)
        assert learned is None or np.array_equal(learned, np.ones(len(wanted), bool) if mask is None else mask)
    whole, generator = both.read(0, both.tokens), np.random.default_rng(1)
    assert np.array_equal(whole.documents, np.repeat(np.arange(both.documents), np.diff(both.bounds())))
    for start, stop in (sorted(generator.choice(both.tokens + 1, 2, replace=False)) for _ in range(50)):
        window = both.read(int(start), int(stop))
        assert np.array_equal(window.tokens, whole.tokens[start:stop])
        assert np.array_equal(window.documents, whole.documents[start:stop])
    assert concatenated(files[:1]) is files[0]
    assert both.identity() != concatenated([hold_out(data, 0.3)[1] for data in reversed(files)]).identity()
