"""companion.accumulation on random splits; and the chapter's definitions are its own."""
import itertools

import jupytext
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import companion.accumulation
from companion.accumulation import accumulate, document_mask, pack, windows
from notebooks import CHAPTERS, code_cells
from test_counting import definitions

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 4)).double()


def pieces_of(sizes, seed, ignored):
    """Micro-batches of these sizes; about a share ``ignored`` of labels is -100."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 3, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (sum(sizes),), generator=draw)
    y[torch.rand(sum(sizes), generator=draw) < ignored] = -100
    return list(zip(x.split(sizes), y.split(sizes)))


def gradient(net):
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in net.parameters()])


def whole_batch(pieces):
    """(mean loss, targets, gradient), computed at once."""
    net = model()
    x, y = (torch.cat(t) for t in zip(*pieces))
    n = int((y != -100).sum())
    if n:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
    return loss.item() if n else 0.0, n, gradient(net)


def mean_of_means(net, window):
    """The bug: each piece divided by its own targets, all by the number of pieces."""
    for x, y in window:
        (F.cross_entropy(net(x), y) / len(window)).backward()
    return 0.0, 0


def by_rows(net, window):
    """Another: divided by rows, as if none were ignored."""
    rows = sum(len(y) for _, y in window)
    for x, y in window:
        (F.cross_entropy(net(x), y, reduction="sum") / max(rows, 1)).backward()
    return 0.0, 0


def gap(method, pieces):
    net = model()
    method(net, pieces)
    return (gradient(net) - whole_batch(pieces)[2]).abs().max().item()


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 10**6), st.sampled_from([0.0, 0.4, 1.0]))
def test_any_split_gives_the_gradient_of_the_whole(sizes, seed, ignored):
    pieces, net = pieces_of(sizes, seed, ignored), model()
    loss, targets, right = whole_batch(pieces)
    got = accumulate(net, pieces)
    assert got[1] == targets and abs(got[0] - loss) < 1e-12
    assert (gradient(net) - right).abs().max() < 1e-12


# The property must be able to fail: these are the two bugs of the chapter.
@pytest.mark.parametrize("method", [mean_of_means, by_rows])
def test_the_usual_bugs_break_the_property(method):
    assert gap(method, pieces_of([2, 7], 0, 0.4)) > 1e-3
    assert gap(accumulate, pieces_of([2, 7], 0, 0.4)) < 1e-12


def test_equal_pieces_hide_the_bug():
    assert gap(mean_of_means, pieces_of([5, 5], 0, 0.0)) < 1e-12


def test_it_adds_to_what_is_there_and_takes_a_generator():
    net, pieces = model(), pieces_of([3, 4], 1, 0.0)
    accumulate(net, (piece for piece in pieces))
    once = gradient(net)
    accumulate(net, pieces)
    assert torch.allclose(gradient(net), 2 * once, rtol=1e-12)


def test_sequences_of_labels():
    net = model()
    x, y = torch.randn(2, 5, 3).double(), torch.randint(4, (2, 5))
    loss, targets = accumulate(net, [(x[:1], y[:1]), (x[1:], y[1:])])
    right = F.cross_entropy(net(x).flatten(0, 1), y.flatten()).item()
    assert targets == 10 and abs(loss - right) < 1e-12


def test_nothing_to_learn():
    net = model()
    assert accumulate(net, []) == (0.0, 0)
    assert accumulate(net, pieces_of([3, 0], 0, 1.0)) == (0.0, 0)
    assert all(p.grad is None for p in net.parameters())


def test_labels_that_do_not_fit():
    with pytest.raises(ValueError, match=r"labels \[3\] do not fit logits \[2, 4\]"):
        accumulate(model(), [(torch.zeros(2, 3).double(), torch.zeros(3, dtype=torch.long))])


@given(st.integers(0, 40), st.integers(1, 12))
def test_windows_lose_nothing(n, k):
    cut = list(windows(range(n), k))
    assert list(itertools.chain(*cut)) == list(range(n))
    assert len(cut) == -(-n // k) and all(len(w) == k for w in cut[:-1])


def test_windows_read_no_further_than_they_must():
    source = iter(range(100))
    assert next(windows(source, 4)) == [0, 1, 2, 3] and next(source) == 4


def test_a_window_of_nothing():
    with pytest.raises(ValueError, match="at least one micro-batch, got 0"):
        windows([1], 0)  # at the call, not at the first window


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
def test_packing_keeps_every_document_whole(lengths, row):
    rows = pack(lengths, row)
    assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in r) for r in rows]
    assert all(0 < n <= row for n in used)
    # any fit: no two rows could be one, so at most twice the least number of rows
    assert all(a + b > row for a, b in itertools.combinations(used, 2))


def test_packing_is_best_fit():
    # the last document fits both rows; first fit would put it with the 7
    assert pack([7, 5, 4, 1], 10) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("bad", [0, -1, 11])
def test_documents_that_fit_no_row(bad):
    with pytest.raises(ValueError, match=f"a document of {bad} tokens in rows of 10"):
        pack([3, bad], 10)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_mask_is_causal_within_documents(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = document_mask(ids)
    for i, j in itertools.product(range(len(ids)), repeat=2):
        assert mask[i, j] == (j <= i and ids[i] == ids[j])
    assert mask.sum() == sum(n * (n + 1) // 2 for n in lengths)


def test_the_chapters_definitions_are_the_packages():
    cells = code_cells(jupytext.read(CHAPTERS / "accumulation.md"))
    taught = definitions("\n".join(c.source for c in cells if not c.source.startswith("%%")))
    with open(companion.accumulation.__file__, encoding="utf-8") as file:
        packaged = definitions(file.read())
    assert set(packaged) == {"accumulate", "windows", "_windows", "pack", "document_mask"}
    assert all(packaged[name] == taught[name] for name in packaged)
