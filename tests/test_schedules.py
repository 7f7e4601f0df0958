"""Schedules on paper: formulas, orders that cannot be, and lists that are refused."""
import random
from fractions import Fraction

import pytest

from companion import schedules as s
from companion.schedules import Action, Schedule, simulate

COSTS = [(1, 1, 1), (3, 4, 2), (Fraction(1, 3), Fraction(5, 7), Fraction(1, 4)), (2, 9, 0)]
GRID = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 8, 13)]


@pytest.mark.parametrize("F, I, W", COSTS)
def test_gpipe_and_1f1b_take_the_same_time_and_hold_different_amounts(F, I, W):
    for p, m in GRID:
        g, o = (simulate(f(p, m), F, I, W) for f in (s.gpipe, s.one_f_one_b))
        assert g.time == o.time == (m + p - 1) * (F + I + W)
        assert g.busy == o.busy == (m * (F + I + W),) * p
        assert g.idle == 1 - Fraction(m, m + p - 1) or abs(g.idle - (p - 1) / (m + p - 1)) < 1e-12
        assert abs(o.overhead - (p - 1) / m) < 1e-12
        assert g.in_flight == (m,) * p
        assert o.in_flight == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize("F, I, W", COSTS)
def test_interleaving_divides_the_bubble(F, I, W):
    for p in range(1, 6):
        for groups in 1, 2, 3:
            for v in 1, 2, 3:
                m = groups * p
                t = simulate(s.interleaved(p, m, v), *(Fraction(x) / v for x in (F, I, W)),
                             size=Fraction(1, v))
                assert t.time == m * (F + I + W) + Fraction(p - 1, v) * (F + I + W)
                if v > 1 and groups > 1:
                    assert t.peak[0] == p * (1 + Fraction(p - 1, p * v))


def test_interleaving_once_is_1f1b():
    assert s.interleaved(4, 8, 1).actions == s.one_f_one_b(4, 8).actions


@pytest.mark.parametrize("F, I, W", COSTS)
def test_zero_bubble(F, I, W):
    for p, m in GRID:
        if m >= p and W <= min(F, I):
            t = simulate(s.zero_bubble(p, m), F, I, W)
            assert t.time == m * (F + I + W) + (p - 1) * (F + I - W)
            assert t.in_flight == (p,) * p
        if m >= 2 * p - 1 and F == I == W:
            t = simulate(s.zero_bubble(p, m, ahead=2), F, I, W)
            assert t.waits == (0,) * p and t.in_flight == (2 * p - 1,) * p


def test_dualpipe_waits_as_published_where_forward_and_input_gradient_are_equal():
    for p in 2, 4, 6, 8:
        for F, I, W in (1, 1, 1), (4, 4, 3):
            m, B = 2 * p + 4, I + W
            t = simulate(s.dualpipe(p, m), F, I, W)
            assert t.time - m * (F + B) == (p // 2 - 1) * ((F + B) + B - 3 * W)
            assert max(t.in_flight) == p + 1
            apart = simulate(s.dualpipe(p, m, paired=False), F, I, W)
            assert apart.time <= t.time and apart.busy == t.busy


def test_messages_take_time():
    for p, m in GRID:
        for hop in 1, Fraction(1, 2):
            g, o, a = (simulate(x, 1, 1, 1, hop).time for x in (
                s.gpipe(p, m), s.one_f_one_b(p, m), s.one_f_one_b(p, m, ahead=2)))
            assert g == 3 * (m + p - 1) + 2 * (p - 1) * hop
            assert o >= g
            if hop == Fraction(1, 2):
                assert a == g


def test_a_hop_inside_a_rank_is_free():
    lists = s.interleaved(1, 3, 4)
    assert simulate(lists, hop=100).time == 3 * 3 * 4 and s.messages(lists) == (0,)


def test_unequal_stages():
    draw = random.Random(0)
    for _ in range(100):
        p, m = draw.randint(1, 6), draw.randint(1, 9)
        c = [draw.randint(0, 9) for _ in range(p)]
        bound = 3 * (sum(c) + (m - 1) * max(c))
        assert simulate(s.gpipe(p, m), c, c, c).time == bound if sum(c) else True
        assert simulate(s.one_f_one_b(p, m), c, c, c).time <= bound


def test_memory_by_size_and_what_is_kept_for_weights():
    lists = s.zero_bubble(4, 8)
    assert simulate(lists, size=3).peak == (12,) * 4
    light = simulate(lists, size=1, kept=0.25)  # W needs a quarter
    assert light.peak[0] == 4 and light.peak[3] == 1 + 3 * 0.25
    assert light.in_flight == (4,) * 4
    assert simulate(s.gpipe(2, 3), size=[1, 10]).peak == (3, 30)


def test_messages_of_every_rank():
    assert s.messages(s.gpipe(4, 8)) == s.messages(s.zero_bubble(4, 8)) == (8, 16, 16, 8)
    assert s.messages(s.interleaved(4, 8, 2)) == (24, 32, 32, 24)
    assert s.messages(s.dualpipe(4, 8)) == (8, 16, 16, 8)
    assert s.messages(s.gpipe(1, 8)) == (0,)


def test_no_schedule_runs_an_action_before_its_input():
    for lists in (s.gpipe(3, 5), s.one_f_one_b(3, 5), s.interleaved(3, 6, 2), s.zero_bubble(3, 5, 2),
                  s.dualpipe(4, 8)):
        t = simulate(lists, 2, 3, 1, hop=Fraction(1, 3))
        starts = {e.action: e for row in t.events for e in row}
        for action, event in starts.items():
            for kind, stage in lists.needs(action):
                before = starts.get(Action(kind, action.micro, stage)) or starts[
                    Action("B", action.micro, stage)]
                hop = Fraction(1, 3) * (lists.where[stage] != lists.where[action.stage])
                assert before.end + hop <= event.start or kind == "F" and stage == action.stage
        for row in t.events:
            assert all(a.end <= b.start for a, b in zip(row, row[1:]))


F0, B0, I0, W0 = (Action(k, 0, 0) for k in "FBIW")
REFUSED = [
    (lambda: s.gpipe(0, 3), "at least 1"), (lambda: s.one_f_one_b(2, 0), "at least 1"),
    (lambda: s.one_f_one_b(2, 2, 0), "at least 1"), (lambda: s.interleaved(4, 6, 2), "no multiple of 4"),
    (lambda: s.zero_bubble(2, 2, 3), "got 3"), (lambda: s.dualpipe(3, 8), "p = 3"),
    (lambda: s.dualpipe(4, 6), "m = 6"), (lambda: s.dualpipe(4, 9), "m = 9"),
    (lambda: Schedule("x", ((F0,),), (0,), 1), "needs F and B"),
    (lambda: Schedule("x", ((F0, B0, B0),), (0,), 1), "twice"),
    (lambda: Schedule("x", ((F0, B0, W0),), (0,), 1), "needs F and B"),
    (lambda: Schedule("x", ((F0, Action("G", 0, 0)),), (0,), 1), "no such action"),
    (lambda: Schedule("x", ((F0, B0), ()), (1,), 1), "stage 0 is on rank 1"),
    (lambda: Schedule("x", ((F0, B0), ()), (0, 1), 2), "passes stages [0]"),
    (lambda: simulate(s.gpipe(2, 2), F=[1, 2, 3]), "[1, 2, 3]"),
    (lambda: simulate(s.gpipe(2, 2), W=-1), "-1"),
    (lambda: simulate(Schedule("x", ((B0, F0),), (0,), 1)), "waiting forever: rank 0 in 0B0"),
]


@pytest.mark.parametrize("call, named", REFUSED)
def test_what_cannot_be_is_refused(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value)


def test_an_order_in_which_ranks_wait_for_each_other():
    lists = Schedule("x", (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)),
        (Action("F", 0, 1), Action("F", 1, 1), Action("B", 0, 1), Action("B", 1, 1))), (0, 1), 2)
    with pytest.raises(ValueError, match="rank 0 in 0B0, rank 1 in 1F1"):
        simulate(lists)
