"""Right and wrong answers to the exercises of chapters/accumulation."""
import torch

from .checking import *  # the tests; their answers are RIGHT and WRONG, below

# ---- accumulation-1: factors

def factors_mean_of_means(counts):
    return [1 / len(counts) if count else 0.0 for count in counts]


def factors_no_guard(counts):
    return [count / sum(counts) for count in counts]


def factors_skip_empty(counts):
    return [count / sum(counts) for count in counts if count]


# ---- accumulation-2: the fewest pieces

def pieces_by(first=12, later=16, step=16, whole=True):
    def answer(parameters, each, batch, budget):
        for k in range(1, batch + 1):
            rows = -(-batch // k) if whole else batch / k
            held = (first if k == 1 else later) * parameters + rows * each
            if max(held, step * parameters) <= budget:
                return k
        return 0
    return answer


def pieces_that_divide(parameters, each, batch, budget):
    right = pieces_by()
    k = right(parameters, each, batch, budget)
    while k and k < batch and batch % k:
        k += 1
    return k


# ---- accumulation-3: token weights

def weights_by_length(pieces):
    return [torch.full((len(p),), 1 / max(len(p), 1)) for p in pieces]


def weights_empty_counted(pieces):
    total = sum(len(p) for p in pieces)
    return [torch.full((len(p),), total / (len(pieces) * max(len(p), 1))) for p in pieces]


def weights_upside_down(pieces):
    total, used = sum(len(p) for p in pieces), sum(len(p) > 0 for p in pieces)
    return [torch.full((len(p),), used * len(p) / total) for p in pieces]


# ---- accumulation-4: exact for any split

def stream_loop(reduction="sum", divide="targets", zero=True, skip=True, report="mean"):
    def answer(model, stream):
        if zero:
            model.zero_grad()
        total, targets, rows, pieces = 0.0, 0, 0, 0
        for x, y in stream:
            n = int((y != -100).sum())
            rows, pieces = rows + len(y), pieces + 1
            if n or not skip:
                loss = torch.nn.functional.cross_entropy(model(x), y, reduction=reduction)
                loss.backward()
                total, targets = total + loss.item(), targets + n
        by = {"targets": targets, "rows": rows, "pieces": pieces, "nothing": 1}[divide]
        for p in model.parameters():
            if p.grad is not None and by:
                p.grad /= by
        return total / max(by, 1) if report == "mean" else total
    return answer


def all_at_once(model, stream):
    pieces = list(stream)
    model.zero_grad()
    if not any((y != -100).any() for _, y in pieces):
        return 0.0
    x, y = (torch.cat(t) for t in zip(*pieces))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def graphs_kept(model, stream):
    model.zero_grad()
    total, targets = 0.0, 0
    for x, y in stream:
        n = int((y != -100).sum())
        if n:
            total = total + torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
            targets += n
    if not targets:
        return 0.0
    (total / targets).backward()
    return (total / targets).item()


def graphs_kept_from_a_list(model, stream):
    return graphs_kept(model, list(stream))  # the stream is over before the first forward pass


def stream_collected(model, stream):
    return stream_loop()(model, list(stream))


def stream_never_detached(model, stream):
    model.zero_grad()
    total, targets = 0.0, 0
    for x, y in stream:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        total, targets = total + loss, targets + (y != -100).sum()
    for p in model.parameters():
        if p.grad is not None and targets:
            p.grad /= targets
    return total / max(targets, 1)


# ---- accumulation-5: packing a stream

def stream_pack(best=True, oldest=True, fullest=True, guard=True, forget=False):
    def answer(lengths, row, open_rows):
        if guard and (open_rows < 1 or any(not 0 < n <= row for n in lengths)):
            raise ValueError("no")
        rows, room = [], {}
        for i, n in enumerate(lengths):
            fitting = [r for r in room if room[r] >= n]
            if fitting:
                order = fitting if oldest else fitting[::-1]
                at = min(order, key=room.get) if best else order[0]
            else:
                if len(room) >= max(open_rows, 1):
                    del room[min(room, key=room.get) if fullest else next(iter(room))]
                at = len(rows)
                rows.append([])
                room[at] = row
            rows[at].append(i)
            room[at] -= n
        return rows
    return answer


# ---- accumulation-6: the tensors of packed rows

def packed_with(border=False, padding=-100, ids=True, guard=True, dtype=torch.long):
    def answer(rows, length):
        if guard and any(sum(len(d) for d in row) > length for row in rows):
            raise ValueError("too long")
        inputs = torch.zeros(len(rows), length, dtype=dtype)
        labels = torch.full((len(rows), length), padding, dtype=dtype)
        numbers = torch.full((len(rows), length), -1, dtype=dtype)
        for n, row in enumerate(rows):
            at = 0
            for i, d in enumerate(row):
                end = at + len(d)
                inputs[n, at:end] = d[:length - at]
                labels[n, at:end] = -100
                labels[n, at:end - 1] = d[1:length - at]
                if border and at and len(d):
                    labels[n, at - 1] = d[0]
                numbers[n, at:end] = i if ids else 0
                at = end
        return inputs, labels, numbers
    return answer


RIGHT = [
    ("accumulation-1", lambda counts: torch.tensor(counts) / max(sum(counts), 1)),  # in fp32
    ("accumulation-4", stream_never_detached),
]
WRONG = {
    "accumulation-1": [
        (factors_mean_of_means, "factors([10, 100])"), (factors_no_guard, "factors([0, 0])"),
        (factors_skip_empty, "factors([0, 3, 0, 1])")],
    "accumulation-2": [
        (pieces_by(later=12), "A = 6P"), (pieces_by(first=16), "met exactly with one piece"),
        (pieces_by(step=0), "the optimizer's step is the peak"),
        (pieces_by(whole=False), "a batch that four does not divide"),
        (pieces_that_divide, "a batch that four does not divide")],
    "accumulation-3": [
        (weights_by_length, "pieces of [10, 100] tokens"), (weights_empty_counted, "[1, 0, 9]"),
        (weights_upside_down, "a token of piece 0")],
    "accumulation-4": [
        (stream_loop("mean", "pieces"), "pieces of 1 and 20"), (stream_loop(divide="rows"), "a third of labels"),
        (stream_loop(divide="nothing"), "one piece of 8"), (stream_loop(report="sum"), "the mean loss is"),
        (stream_loop(zero=False), "one piece of 8: the gradient"),
        (stream_loop("mean", "pieces", skip=False), "pieces of 1 and 20"),
        (all_at_once, "rows at once"), (graphs_kept, "are held at once"),
        (graphs_kept_from_a_list, "are held at once"), (stream_collected, "3 pieces are kept")],
    "accumulation-5": [
        (stream_pack(best=False), "the least room"), (stream_pack(oldest=False), "a tie goes to the oldest"),
        (stream_pack(fullest=False), "the fullest is closed"), (stream_pack(guard=False), "should be a ValueError")],
    "accumulation-6": [
        (packed_with(border=True), "two documents: labels"), (packed_with(padding=0), "and padding: labels"),
        (packed_with(ids=False), "two documents: documents"), (packed_with(dtype=torch.int32), "should be int64"),
        (packed_with(guard=False), "5 tokens in a row of length 4")],
}
