"""Rows of each packing and of mixtures: what lies in them, decided by (seed, number) alone, and counted rightly."""

import zlib
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from ithaca.base.errors import DataError, RunError
from ithaca.data.best_fit import PADDING
from ithaca.data.mixture import Mixture, mix
from ithaca.data.packing import Rows, Whole, rows_per_epoch
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.sample import sequences
from ithaca.parallel.batch import IGNORED
from tests.data.test_best_fit import log_normal


def make_file(lengths: np.ndarray | list[int], masked: bool = False, first: int = 0, vocab: int = 2**32) -> TokenFile:
    """Documents of these lengths. A token is its own place in the file, from `first` on. A third is not learned."""
    bounds = np.cumsum([0, *lengths])
    learned = np.arange(bounds[-1]) % 3 > 0 if masked else None
    return in_memory(np.arange(first, first + bounds[-1]), bounds, learned, tokenizer="bytes", vocab=vocab)


def documents_of(row: torch.Tensor, ids: torch.Tensor) -> list[list[int]]:
    """The tokens of each document of a row."""
    edges = [0, *(np.flatnonzero(np.diff(ids.numpy())) + 1).tolist(), len(row)]
    return [row[start:stop].tolist() for start, stop in pairwise(edges)]


# One source
def test_cut_is_what_it_was_before_there_was_a_choice() -> None:
    """The checksums were computed with the version before."""
    lengths = [3, 50, 7, 1, 200, 31, 64, 9]
    bounds = np.cumsum([0, *lengths])
    for mask, wanted in ((None, 1624194885), (np.arange(bounds[-1]) % 3 > 0, 601861343)):
        data, crc = in_memory(np.arange(bounds[-1]) * 7 % 251, bounds, mask), 0
        rows = Rows(data, 48, 11, "cut")
        for step in range(40):
            for tensor in rows.draw(3, step):
                crc = zlib.crc32(tensor.numpy().tobytes(), crc)
        assert crc == wanted
        assert rows.per_epoch == 365 // 48
        assert rows.describe() == []
        assert rows.metrics(12) == {}


@pytest.mark.parametrize("masked", [False, True])
def test_whole_documents_once_an_epoch(masked: bool) -> None:
    lengths = log_normal(300, 40, 0.8)
    data, length = make_file(lengths, masked), 256
    rows = Rows(data, length, 3, "whole")
    bounds = data.bounds()
    seen: Counter[int] = Counter()
    for number in range(2 * rows.per_epoch):
        tokens, labels, ids = (tensor[0] for tensor in rows.draw(1, number))
        filled = rows.tally(number + 1)[0].tokens - rows.tally(number)[0].tokens
        for document in documents_of(tokens[:filled], ids[:filled]):
            start = document[0]
            place = int(np.searchsorted(bounds, start, "right")) - 1
            assert document == list(range(start, min(int(bounds[place + 1]), start + length)))
            assert start == bounds[place] or (lengths[place] > length and not masked)
            seen[place] += len(document)
        learned = [token if not masked or token % 3 else IGNORED for token in tokens[:filled].tolist()]
        assert labels.tolist() == learned + [IGNORED] * (length - filled)
        assert (tokens[filled:] == 0).all()
    assert seen == {place: 2 * min(int(size), length if masked else int(size)) for place, size in enumerate(lengths)}


def test_padding_belongs_to_nobody() -> None:
    rows = Rows(make_file([1500, 3000]), 5000, 0, "whole")
    ids = rows.draw(1, 0)[2][0].tolist()
    assert set(ids[:4500]) == {0, 1}
    assert set(ids[4500:]) == {2}
    rows = Rows(make_file([1000]), 1000 + 3 * PADDING + 5, 0, "whole")
    counts = Counter(rows.draw(1, 0)[2][0].tolist())
    assert counts == {0: 1000, 1: PADDING, 2: PADDING, 3: PADDING, 4: 5}


def test_joined_is_cut_without_documents() -> None:
    data = make_file([5, 9, 20, 3], masked=True)
    for step in range(6):
        mine, theirs = Rows(data, 16, 2, "joined").draw(2, step), sequences(data, 2, 16, 2, step)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert not mine[2].any()


def test_auto_keeps_conversations_whole_and_cuts_text() -> None:
    for masked, packing in ((True, "whole"), (False, "cut")):
        data = make_file([5, 9, 20, 3, 8], masked)
        for step in range(4):
            found, wanted = (Rows(data, 16, 0, name).draw(2, step) for name in ("auto", packing))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_a_conversation_is_never_cut_from_its_prompt(too_long: str) -> None:
    """Every document of a row begins at the beginning of one in the file; what is left out is counted and said."""
    data = make_file([30, 7, 50, 12, 3], masked=True)
    rows = Rows(data, 16, 0, "auto", too_long)
    starts = set()
    for number in range(rows.per_epoch):
        tokens, _, ids = (tensor[0] for tensor in rows.draw(1, number))
        filled = rows.tally(number + 1)[0].tokens - rows.tally(number)[0].tokens
        starts |= {document[0] for document in documents_of(tokens[:filled], ids[:filled])}
    assert starts == ({30, 87, 99} if too_long == "drop" else {0, 30, 37, 87, 99})
    how, tokens = ("dropped", 80) if too_long == "drop" else ("truncated", 48)
    (line,) = rows.describe()
    assert rows.metrics(3 * rows.per_epoch)["left_out"] == 3 * tokens
    assert rows.conclude(3 * rows.per_epoch)[0].endswith(f" padding; {3 * tokens} tokens left out (data.too_long)")
    assert (
        f"2 of them longer than 16 tokens are {how}, without {tokens} tokens, {tokens / 102:.1%} (data.too_long)"
        in line
    )


def test_grouping_and_order_change_nothing() -> None:
    """A row is a function of seed and number: in any grouping, from the back, and from a fresh object."""
    one, other = make_file(log_normal(80, 30, 1.0), masked=True), make_file(log_normal(50, 60, 0.5), first=10**6)
    data = mix({"a": (0.6, one), "b": (0.4, other)}, 1, None)
    rows = Rows(data, 128, 4, "auto")
    alone = [rows.draw(1, number) for number in range(120)]
    for batch in (2, 5, 24):
        for step in reversed(range(120 // batch)):
            together = Rows(data, 128, 4, "auto").draw(batch, step)
            part = rows.draw(batch, step, range(1, batch))
            for kind in range(3):
                wanted = torch.cat([item[kind] for item in alone[step * batch : (step + 1) * batch]])
                assert torch.equal(together[kind], wanted)
                assert torch.equal(part[kind], wanted[1:])
    assert not torch.equal(Rows(data, 128, 5, "auto").draw(4, 0)[0], rows.draw(4, 0)[0])


def test_far_steps_cost_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan of each source that is packed whole, however far the step is."""
    data = mix({"a": (0.7, make_file([9, 5, 3] * 40, True)), "b": (0.3, make_file([8] * 99, True, 10**6))}, 1, None)
    rows, made = Rows(data, 16, 0, "auto"), []
    plan = Whole._make
    monkeypatch.setattr(Whole, "_make", lambda self, epoch: made.append(epoch) or plan(self, epoch))
    rows.draw(4, 10**9)
    assert len(made) <= 2
    near = Rows(data, 16, 0, "auto")
    for step in range(40):
        near.draw(4, step)
    assert all(torch.equal(a, b) for a, b in zip(near.draw(4, 39), Rows(data, 16, 0, "auto").draw(4, 39), strict=True))


def test_a_plan_is_made_ahead_of_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.data.packing._AHEAD", 1)
    data = make_file([9, 5, 3] * 40, masked=True)
    rows, fresh = Rows(data, 16, 0, "auto"), Rows(data, 16, 0, "auto")
    (packed,) = rows._packed
    assert isinstance(packed, Whole)
    for number in range(3 * rows.per_epoch):
        epoch, index = divmod(number, rows.per_epoch)
        found = rows.draw(1, number)
        ahead = packed._ahead
        assert (ahead is not None and ahead[0] == epoch + 1) == (index >= rows.per_epoch * 3 // 4)
        if index == 0:
            assert all(torch.equal(a, b) for a, b in zip(found, fresh.draw(1, number), strict=True))
        assert len(packed._plans) <= 2
    rows.close()


def test_a_document_that_has_become_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds that a plan is made of are read without their checksums; blocks are compared when they are read."""
    data = make_file([9, 5, 3], masked=True)
    monkeypatch.setattr(data, "bounds", lambda: np.array([0, 10, 14, 17]))
    with pytest.raises(RunError, match="a document that had 10 tokens from token 0 on is shorter now"):
        Rows(data, 16, 0, "whole").draw(2, 0)


# Mixtures
def counted(rows: Rows, count: int, firsts: list[int]) -> list[int]:
    """Tokens of each source in the first rows, by what stands in them."""
    totals = [0] * len(firsts)
    for number in range(count):
        tokens, _, ids = (tensor[0].numpy() for tensor in rows.draw(1, number))
        real = (
            len(tokens)
            - sum(each.padding for each in rows.tally(number + 1))
            + sum(each.padding for each in rows.tally(number))
        )
        source = max(index for index, first in enumerate(firsts) if tokens[0] >= first)
        assert ids[real - 1] < (ids[real] if real < len(ids) else ids[real - 1] + 1)
        totals[source] += real
    return totals


@pytest.mark.parametrize("length", [2048, 8192, 16384])
@pytest.mark.parametrize("weights", [(0.7, 0.3), (5, 1), (1, 1), (0.9, 0.1)])
def test_realised_shares_over_a_million_tokens(length: int, weights: tuple[float, float]) -> None:
    """Within 1 %, of a source that is cut and one that is packed whole with padding."""
    chats, text = log_normal(400, 900, 0.9), log_normal(60, 9000, 1.2)
    firsts = [0, 10**8]
    files = {"chats": (weights[0], make_file(chats, masked=True)), "text": (weights[1], make_file(text, first=10**8))}
    rows = Rows(mix(files, 1, None), length, 0, "auto")
    count = 2**20 // length
    totals = counted(rows, count, firsts)
    assert sum(totals) > 0.97 * 2**20
    assert totals[0] / sum(totals) == pytest.approx(weights[0] / sum(weights), abs=0.01)
    tally = {each.name: each for each in rows.tally(count)}
    assert [tally["chats"].tokens, tally["text"].tokens] == totals
    assert tally["chats"].padding + tally["text"].padding == count * length - sum(totals)


def test_shares_are_of_tokens_without_padding() -> None:
    """A source whose rows are a third padding gets more rows."""
    chats, text = make_file([70] * 50, masked=True), make_file([1000] * 9, first=10**8)
    rows = Rows(mix({"chats": (1, chats), "text": (1, text)}, 1, None), 100, 0, "auto")
    tally = {each.name: each for each in rows.tally(1000)}
    assert tally["chats"].tokens / (tally["chats"].tokens + tally["text"].tokens) == pytest.approx(0.5, abs=0.002)
    assert tally["chats"].padding == pytest.approx(0.3 * 100 * 1000 / 1.7, rel=0.01)


def test_every_source_goes_around_by_itself() -> None:
    """Its rows are those that it has alone, in their order."""
    one, other = make_file([40] * 30), make_file([33, 50] * 9, first=10**6)
    mixed = Rows(mix({"a": (0.25, one), "b": (0.75, other)}, 1, None), 64, 7, "cut")
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for number in range(80):
        row = mixed.draw(1, number)[0]
        found[bool(row[0, 0] >= 10**6)].append(row)
    for data, rows in ((one, found[False]), (other, found[True])):
        alone = Rows(data, 64, 7, "cut")
        assert torch.equal(torch.cat(rows), torch.cat([alone.draw(1, number)[0] for number in range(len(rows))]))
    assert len(found[False]) == 20


def test_the_order_of_the_table_does_not_matter() -> None:
    one, other = make_file([40] * 30), make_file([33, 50] * 9, first=10**6)
    a = mix({"a": (1, one), "b": (1, other)}, 1, None)
    b = mix({"other": (5, other), "one": (5, one)}, 1, None)
    assert a.identity() == b.identity()
    assert torch.equal(Rows(a, 64, 0, "cut").draw(8, 3)[0], Rows(b, 64, 0, "cut").draw(8, 3)[0])
    assert a.identity() != mix({"a": (1.5, one), "b": (1, other)}, 1, None).identity()


def test_shares_by_length() -> None:
    """Half of the tokens from documents of 1000 and more, and the files keep their shares."""
    lengths = log_normal(400, 300, 1.3)
    first, second = make_file(lengths), make_file([200] * 500, first=10**8)  # the second has no long ones
    data = mix({"a": (0.8, first), "b": (0.2, second)}, 1000, 0.5)
    assert isinstance(data, Mixture)
    shares = {source.name: source.share for source in data.sources}
    assert shares == pytest.approx({"a of 1000 tokens and more": 0.5, "a below 1000 tokens": 0.3, "b": 0.2})
    for source in data.sources:
        sizes = np.diff(source.data.bounds())
        assert sizes.min() >= 1000 if "more" in source.name else sizes.max() < 1000
    rows = Rows(data, 4096, 0, "cut")
    tally = {each.name: each.tokens for each in rows.tally(256)}
    assert tally["a of 1000 tokens and more"] == pytest.approx(0.5 * 2**20, abs=0.01 * 2**20)
    assert tally["b"] == pytest.approx(0.2 * 2**20, abs=0.01 * 2**20)
    (alone,) = {"c": (3.0, first)}.items()
    split = mix(dict([alone]), 1000, 0.25)
    assert isinstance(split, Mixture)
    assert [source.share for source in split.sources] == [0.75, 0.25]


def test_rows_of_an_epoch() -> None:
    chats, text = make_file([60, 70, 40, 40, 90, 20], masked=True), make_file([1000], first=10**6)
    assert rows_per_epoch(text, 100, "auto", "truncate") == 10
    assert rows_per_epoch(text, 3000, "cut", "truncate") == 1
    assert rows_per_epoch(text, 300, "whole", "truncate") == 4
    assert rows_per_epoch(chats, 100, "auto", "truncate") == 4
    assert rows_per_epoch(chats, 80, "auto", "drop") == 3
    mixed = mix({"a": (1, chats), "b": (1, text)}, 1, None)
    assert rows_per_epoch(mixed, 100, "auto", "truncate") == 14
    assert Rows(mixed, 100, 0, "auto").per_epoch == 14


@pytest.mark.parametrize(
    ("files", "long", "share", "sentence"),
    [
        ({"a": [5], "b": "other"}, 1, None, "'b' was made with another tokenizer \\(sha256:12\\) than 'a' \\(bytes\\)"),
        ({"a": [5, 6], "b": [5, 6]}, 1, None, "'a' and 'b' of data.mix have the same documents"),
        ({"a": [5, 8]}, 9, 0.5, "no document has 9 tokens \\(data.long\\): the longest has 8; data.long=8 works"),
        ({"a": [50, 80]}, 9, 0.5, "can only have a share of 1 in these data"),
        ({"a": [50, 8], "b": [3]}, 9, 0.6, "more \\(data.long\\) can only have a share of 0 to 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed(files: dict[str, list[int] | str], long: int, share: float | None, sentence: str) -> None:
    opened = {}
    for name, lengths in files.items():
        if isinstance(lengths, str):
            opened[name] = 1.0, in_memory(np.arange(9), np.array([0, 9]), tokenizer="sha256:12")
        else:
            opened[name] = 1.0, make_file(lengths)
    with pytest.raises(DataError, match=sentence) as refused:
        mix(opened, long, share)
    assert "\n" not in str(refused.value)


def test_what_is_said() -> None:
    rows = Rows(make_file([60, 170, 40, 40, 90, 20]), 100, 0, "whole")
    assert rows.describe() == [
        "Data: Python's standard library: 6 documents in 5 sequences an epoch, 16.0% padding; "
        "1 of them longer than 100 tokens is cut into pieces"
    ]
    assert rows.metrics(5) == {"padding": 80, "left_out": 0}
    assert rows.conclude(10) == ["Data seen: Python's standard library (2.00 epochs); 840 tokens and 16.0% padding"]
    assert rows.conclude(0) == []
    mixed = Rows(mix({"a": (3, make_file([99])), "b": (1, make_file([400], first=999))}, 1, None), 50, 0, "joined")
    assert mixed.describe() == [
        "Data: a: 75.0% of tokens, 1 sequence an epoch, without a mask between documents",
        "Data: b: 25.0% of tokens, 8 sequences an epoch, without a mask between documents",
    ]
    assert mixed.metrics(8) == {
        "tokens/a": 300,
        "tokens/b": 100,
        "epochs/a": 6.0,
        "epochs/b": 0.25,
        "padding": 0,
        "left_out": 0,
    }
    assert mixed.conclude(8) == ["Data seen: 75.0% a (6.00 epochs), 25.0% b (0.25 epochs); 400 tokens and 0.0% padding"]
