"""A large batch in small pieces: exact accumulation, windows, and packed rows.

    from companion.accumulation import accumulate, windows
    for window in windows(loader, 4):          # the last one may be shorter
        optimizer.zero_grad()
        loss, targets = accumulate(model, window)
        if targets:                            # else even zero gradients move Adam
            optimizer.step()

Limits: the loss is a mean of cross entropies over targets, a label of -100 is none;
layers that mix examples (BatchNorm) see micro-batches. One process: over ranks, sum the
targets of all of them first.

Taught in: chapters/accumulation.
"""
import bisect

import torch.nn.functional as F


def accumulate(model, window):
    """Add the gradient of the window's mean loss to ``.grad``, one micro-batch at a time.

    window: (inputs, labels) pairs; model(inputs): logits [..., V] of labels [...].
    Sizes and numbers of targets may differ, down to none: the divisor is the number of
    targets in the window. Returns (mean loss, number of targets); (0.0, 0) without any.

    Raises ValueError if labels and logits differ in shape. Taught in: chapters/accumulation.
    """
    window = list(window)
    targets = sum(int((labels != -100).sum()) for _, labels in window)
    mean = 0.0
    for inputs, labels in window:
        if not (labels != -100).any():
            continue
        logits = model(inputs)
        if logits.shape[:-1] != labels.shape:
            raise ValueError(f"labels {list(labels.shape)} do not fit "
                             f"logits {list(logits.shape)}")
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(),
                               reduction="sum") / targets
        loss.backward()
        mean += loss.item()
    return mean, targets


def windows(micro_batches, k):
    """Lists of ``k`` consecutive items; the last one is shorter where k does not divide.

    Reads no further ahead than the window. Raises ValueError unless k is at least 1.
    Taught in: chapters/accumulation.
    """
    if k < 1:
        raise ValueError(f"a window needs at least one micro-batch, got {k}")
    return _windows(micro_batches, k)


def _windows(micro_batches, k):
    window = []
    for item in micro_batches:
        window.append(item)
        if len(window) == k:
            yield window
            window = []
    if window:
        yield window


def pack(lengths, row):
    """Rows of whole documents: best fit, the longest first. Lists of indices.

    Each document goes where it leaves the least room; none is cut. Raises ValueError for
    a document that is empty or longer than ``row``.
    Source: Krell et al. 2021, arXiv:2107.02027. Taught in: chapters/accumulation.
    """
    rows, rooms = [], []  # rooms: (tokens left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not 0 < lengths[i] <= row:
            raise ValueError(f"a document of {lengths[i]} tokens "
                             f"in rows of {row}")
        at = bisect.bisect_left(rooms, (lengths[i], -1))
        if at == len(rooms):
            rooms.append((row, len(rows)))
            rows.append([])
        room, n = rooms.pop(at)
        rows[n].append(i)
        bisect.insort(rooms, (room - lengths[i], n))
    return rows


def document_mask(documents):
    """documents: [T] ids -> [T, T] bool: position i may attend to j.

    Causal, and within one document. Taught in: chapters/accumulation.
    """
    same = documents[:, None] == documents[None, :]
    return same.tril()
