"""Right and wrong answers to the exercises of chapters/composing."""
from .checking import *  # the tests; their answers are RIGHT and WRONG, below


def groups_by(stride=lambda shape, axis: 1, guard=True):
    def mesh_groups(shape, axis):
        if guard and not 0 <= axis < len(shape):
            raise ValueError(axis)
        step, n, total = stride(shape, axis), shape[axis], 1
        for size in shape:
            total *= size
        return [[f + k * step for k in range(n)] for f in range(total) if f // step % n == 0]
    return mesh_groups


def axis_stride(shape, axis):
    step = 1
    for size in shape[axis + 1:]:
        step *= size
    return step


def first_is_near(shape, axis):
    return axis_stride(shape[::-1], len(shape) - 1 - axis)


def idle_by(whole=lambda m, bubble: m + bubble, guard=True, interleave=True):
    def idle_share(batch, dp, micro, pp, chunks):
        if guard and batch % (dp * micro):
            raise ValueError(batch)
        bubble = (pp - 1) / (chunks if interleave else 1)
        return bubble / whole(batch // (dp * micro), bubble)
    return idle_share


def items_by(place=lambda rank, shape: rank // (shape[1] * shape[2]), parts=lambda s: s[0],
             guard=True):
    def items_of(rank, shape, order, batch, step):
        if guard and batch % shape[0]:
            raise ValueError(batch)
        each = batch // parts(shape)
        start = step * batch + place(rank, shape) * each
        return order[start:start + each]
    return items_of


def mend_by(partial=True, mean=True, split_too=False, quiet=False):
    def mend(grads, kinds, all_reduce):
        dp, tp = len(grads), len(grads[0])
        for name, kind in kinds.items():
            if partial and (kind == "partial" or split_too):
                for row in grads:
                    all_reduce([row[t][name] for t in range(tp)])
            for t in range(tp):
                column = [grads[d][t][name] for d in range(dp)]
                if quiet:
                    total = sum(g.clone() for g in column)
                    [g.copy_(total) for g in column]
                else:
                    all_reduce(column)
                for g in column:
                    g /= dp if mean else 1
    return mend


def mend_twice(grads, kinds, all_reduce):
    mend_by()(grads, kinds, all_reduce)
    for row in grads:  # the same numbers once more: right, and needless
        for t in range(len(row)):
            for name in kinds:
                column = [grads[d][t][name] for d in range(len(grads))]
                all_reduce(column)
                for g in column:
                    g /= len(grads)


def plan_by(bubble=1, fits=True, divide=True, pick=min):
    def quickest_plan(layers, states, layer_seconds, gpus, room, batch):
        plans = []
        for tp in (1, 2, 4, 8):
            for pp in range(1, layers + 1):
                if gpus % (tp * pp) or layers % pp:
                    continue
                dp = gpus // (tp * pp)
                if (divide and batch % dp) or (fits and states / (tp * pp) > room):
                    continue
                layer = layer_seconds / tp * (1 + 0.05 * (tp - 1))
                plans.append(((batch // dp + bubble * (pp - 1)) * (layers // pp) * layer,
                              tp, pp, dp))
        return pick(plans, default=None)
    return quickest_plan


WRONG = {
    "composing-1": [
        (groups_by(), "mesh_groups((2, 2, 2), 0)"), (groups_by(first_is_near), "mesh_groups((2, 2, 2), 0)"),
        (groups_by(axis_stride, guard=False), "mesh_groups((2, 2), "),
        (lambda shape, axis: [[0]], "mesh_groups(")],
    "composing-2": [
        (idle_by(whole=lambda m, bubble: m), "idle_share(1024"), (idle_by(guard=False), "ValueError"),
        (idle_by(interleave=False), "idle_share(2048")],
    "composing-3": [
        (items_by(place=lambda rank, shape: rank), "items_of("),
        (items_by(place=lambda rank, shape: rank % shape[0]), "items_of("),
        (items_by(parts=lambda s: s[0] * s[1] * s[2]), "items_of("),
        (items_by(guard=False), "ValueError")],
    "composing-4": [
        (mend_by(partial=False), "gradient of 'norm' (partial)"), (mend_by(mean=False), "gradient of"),
        (mend_by(split_too=True), "gradient of 'up' (split)"), (mend_twice, "are enough"),
        (mend_by(quiet=True), "sent 0 tensors")],
    "composing-5": [
        (plan_by(bubble=0), "quickest_plan("), (plan_by(fits=False), "quickest_plan("),
        (plan_by(pick=max), "quickest_plan("), (plan_by(divide=False), "quickest_plan("),
        (lambda *a: plan_by()(*a) or (0, 1, 1, 1), "expected None")],
}
