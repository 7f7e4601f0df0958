"""The pipeline engine and PyTorch's: equal to one process, for every schedule."""
import pytest

from companion import ranks

# One launch runs many cases. The reference is one process with the whole batch.
EQUAL = '''
import random
import torch.nn.functional as F
from companion import schedules as s
from companion.gpt import Config, Decoder
from companion.pipeline import Engine, cut, sum_tied
from companion.wire import recorded


def loss_of(tokens):
    return lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / tokens


def difference(mine, whole):
    """Largest distance from the one-process decoder, of parameters or of gradients."""
    worst = 0.0
    for stage in mine.values():
        names = {id(p): n for n, p in stage.named_parameters()}
        pairs = [(stage.embedding, whole.embedding), (stage.norm, whole.norm),
                 (stage.head, whole.head), *zip(stage.blocks, stage.originals)]
        for a, b in pairs:
            if a is not None:
                for p, q in zip(a.parameters(), b.parameters()):
                    worst = max(worst, (p - q).abs().max().item(),
                                (p.grad - q.grad).abs().max().item())
    return worst


def case(schedule, seed, steps=3):
    draw = random.Random(seed)
    m, depth = schedule.micros, schedule.depth
    config = Config(vocab=17, width=16, layers=draw.randint(depth, depth + 2), heads=2,
                    kv_heads=draw.choice([1, 2]), hidden=24, context=8)
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(Decoder(config).double())
    whole, parts = models
    stages = cut(parts, depth)
    mine = {k: stages[k] for k in schedule.stages_of(rank)}
    blocks = list(whole.blocks)
    for k, stage in enumerate(stages):
        stage.originals = tuple(blocks[:len(stage.blocks)])
        del blocks[:len(stage.blocks)]
    optimizers = [torch.optim.AdamW(ps, lr=1e-2) for ps in (
        list(whole.parameters()), [p for stage in mine.values() for p in stage.parameters()])]
    shapes = [(draw.randint(1, 3), draw.randint(1, 8)) for _ in range(m)]
    like = lambda x: torch.empty(*x.shape, config.width, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(steps):
        batch = [tuple(torch.randint(0, 17, shape, generator=g) for _ in range(2)) for shape in shapes]
        loss = loss_of(sum(t.numel() for _, t in batch))
        for o in optimizers:
            o.zero_grad()
        total = sum(loss(whole(x), t) for x, t in batch)
        total.backward()
        engine = Engine(schedule, mine, loss, like)
        got = engine.step(batch)
        sum_tied(schedule, mine)
        if got is not None:
            worst = max(worst, abs(got - total.item()))
        for o in optimizers:
            o.step()
        worst = max(worst, difference(mine, whole))
    plan = s.simulate(schedule)
    held = engine.in_flight == plan.in_flight[rank]
    return worst, held and engine.sent == s.messages(schedule)[rank]


draw = random.Random(SEED)
p, results = world_size, []
for round in range(ROUNDS):
    m = draw.randint(1, 9)
    v = draw.randint(1, 3)
    for schedule in (s.gpipe(p, m), s.one_f_one_b(p, m), s.zero_bubble(p, m),
                     s.zero_bubble(p, m, 2), s.interleaved(p, p * draw.randint(1, 3), v)):
        worst, counts = case(schedule, draw.randrange(10**6))
        results.append((schedule.name, m, v, worst, counts))
'''


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_equals_one_process(p):
    source = EQUAL.replace("SEED", str(p)).replace("ROUNDS", "2")
    got = ranks.run(source, p, get=["results"], backend="gloo", timeout=120).values["results"]
    for rank, results in enumerate(got):
        assert len(results) == 10
        for name, m, v, worst, counts in results:
            assert worst < 1e-10, (rank, name, m, v, worst)
            assert counts, (rank, name, m, v)


def test_without_the_sum_of_tied_gradients_it_is_not_equal():
    source = EQUAL.replace("SEED", "0").replace("ROUNDS", "0").replace(
        "sum_tied(schedule, mine)", "pass") + '''
results = [case(s.one_f_one_b(2, 3), 0)[0]]'''
    got = ranks.run(source, 2, get=["results"], backend="gloo").values["results"]
    assert max(r for (r,) in got) > 1e-4


# PyTorch's lists run in our engine, and its engines compute our gradients. Warnings are errors.
TORCH = EQUAL.replace("SEED", "0").replace("ROUNDS", "0") + '''
import copy
import warnings
from torch.distributed import pipelining
warnings.simplefilter("error")


def parse(text):
    kind = next(c for c in text if c in "FBIW")
    stage, micro = map(int, text.split(kind))
    return s.Action(kind, micro, stage)


def engine_of(name, modules, m):
    stages = [pipelining.PipelineStage(x, k, depth, torch.device("cpu")) for k, x in modules.items()]
    engine = getattr(pipelining, name)(stages if several else stages[0], m, share)
    engine.scale_grads = False  # PyTorch 2.6 never does, newer ones by default
    return engine


share = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) / m
p, m, gaps, lists = world_size, 8, {}, {}
config = Config(vocab=17, width=16, layers=8, heads=2, kv_heads=1, hidden=24, context=8)
like = lambda x: torch.empty(*x.shape, config.width, dtype=torch.float64)
g = torch.Generator().manual_seed(0)
x, t = (torch.randint(0, 17, (m, 6), generator=g) for _ in range(2))
for ours, name in ((s.gpipe(p, m), "ScheduleGPipe"), (s.one_f_one_b(p, m), "Schedule1F1B"),
                   (s.interleaved(p, m, 2), "ScheduleInterleaved1F1B"),
                   (s.zero_bubble(p, m), "ScheduleInterleavedZeroBubble"),
                   (None, "ScheduleZBVZeroBubble")):
    several = ours is None or "Interleaved" in name
    depth = ours.depth if ours else 2 * p
    where = ours.where if ours else (*range(p), *reversed(range(p)))
    torch.manual_seed(0)
    stages = cut(Decoder(config).double(), depth)
    mine = {k: stages[k] for k in range(depth) if where[k] == rank}
    theirs = copy.deepcopy(mine)
    engine = engine_of(name, theirs, m)
    runs = ours or hasattr(pipelining.schedules, "_wait_batch_p2p")  # 2.6 has the list of ZBV only
    if runs:
        engine.step(*((x,) if 0 in mine else ()), **({"target": t} if depth - 1 in mine else {}))
    if several:
        order = tuple(tuple(parse(str(a)) for a in engine.pipeline_order[r] if a is not None)
                      for r in range(p))
        lists[name] = ours is None or order == ours.actions
        ours = s.Schedule(name, order, tuple(where), depth)
    Engine(ours, mine, share, like).step(list(zip(x.split(1), t.split(1))))
    gaps[name] = max((q.grad - r.grad).abs().max().item() for k in mine
                     for q, r in zip(mine[k].parameters(), theirs[k].parameters())) if runs else 0.0
'''


@pytest.mark.parametrize("p", [2, 4])
def test_pytorchs_engines_and_lists(p):
    got = ranks.run(TORCH, p, get=["gaps", "lists"], backend="gloo").values
    for gaps, lists in zip(got["gaps"], got["lists"]):
        assert len(gaps) == 5 and max(gaps.values()) < 1e-12, gaps
        assert len(lists) == 3 and all(lists.values()), lists


MEMORY_AND_BYTES = EQUAL.replace("SEED", "0").replace("ROUNDS", "0") + '''
from companion.counting import Film
from companion.wire import counted


def run(schedule, measure):
    torch.manual_seed(0)
    stages = cut(Decoder(config).double(), schedule.depth)
    mine = {k: stages[k] for k in schedule.stages_of(rank)}
    g = torch.Generator().manual_seed(0)
    batch = [tuple(torch.randint(0, 17, (2, 32), generator=g) for _ in range(2))
             for _ in range(schedule.micros)]
    engine = Engine(schedule, mine, loss_of(1), like)
    return measure(engine, mine, batch)


def peak(engine, mine, batch):
    film = Film(parameters=[q for k in mine.values() for q in k.parameters()],
                inputs=[x for pair in batch for x in pair])
    with film, film.saving():
        engine.step(batch)
    return max(film.frames()["activations"])


config = Config(vocab=17, width=32, layers=8, heads=2, kv_heads=1, hidden=24, context=32)
like = lambda x: torch.empty(*x.shape, config.width, dtype=torch.float64)
p, one, held, sent = world_size, 2 * 32 * 32 * 8, [], []
for make in s.gpipe, s.one_f_one_b:
    ratio = run(make(p, 6), peak) / run(make(p, 1), peak)
    held.append((ratio, s.simulate(make(p, 6)).in_flight[rank]))
for schedule in s.gpipe(p, 6), s.one_f_one_b(p, 6), s.interleaved(p, 6, 2), s.zero_bubble(p, 6):
    wire = run(schedule, lambda engine, mine, batch: counted(engine.step, batch))
    sent.append((wire, one * s.messages(schedule)[rank]))
'''


@pytest.mark.parametrize("p", [2, 3])
def test_storages_and_bytes_are_the_simulated_ones(p):
    got = ranks.run(MEMORY_AND_BYTES, p, get=["held", "sent"], backend="gloo").values
    for held, sent in zip(got["held"], got["sent"]):
        for ratio, want in held:
            assert abs(ratio / want - 1) < 0.02, held
        for wire, want in sent:
            assert 0 <= wire - want < 0.06 * want, sent


REFUSED = '''
from companion import schedules as s
from companion.gpt import Config, Decoder
from companion.pipeline import Engine, cut
said = []
for call in (lambda: Engine(s.gpipe(3, 2), {rank: None}, None, None),
             lambda: Engine(s.gpipe(2, 2), {1 - rank: None}, None, None),
             lambda: Engine(s.dualpipe(2, 4), {rank: None}, None, None),
             lambda: Engine(s.gpipe(2, 2), {rank: torch.nn.Identity()}, None, None).step([1]),
             lambda: cut(Decoder(Config(width=8, layers=2, heads=1, kv_heads=1, hidden=8)), 2, [1, 2])):
    try:
        call()
        said.append("nothing")
    except ValueError as error:
        said.append(str(error))
'''


def test_what_does_not_fit_is_refused():
    for said in ranks.run(REFUSED, 2, get=["said"], backend="gloo").values["said"]:
        for text, named in zip(said, ("for 3 ranks", "has stages", "2 pipe", "1 micro-batches", "[1, 2]")):
            assert named in text, said
