"""The timer: on a real CPU clock, on a simulated GPU, and against answers that would fool it."""
import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from companion import bench
from companion.bench import Sleepy, Traffic, mfu, refuse_above_peak, rotating, timed


# ---- on this CPU; a sleep is never shorter than asked, and a loaded machine only makes it longer

def test_the_time_is_per_call():
    result = timed(lambda: time.sleep(0.01), seconds=0.1)
    assert 0.01 <= result.low <= result.seconds <= result.high
    assert result.seconds < 0.05 and result.calls >= bench.FEWEST
    assert result.spread == pytest.approx((result.high - result.low) / result.seconds)


def test_the_first_call_stands_apart():
    calls = []

    def slow_at_first():
        time.sleep(0.001 if calls else 0.2)
        calls.append(1)

    result = timed(slow_at_first, seconds=0.02)
    assert result.first >= 0.2 > 10 * result.seconds


def test_a_short_function_is_timed_in_blocks():
    result = timed(lambda: None, seconds=0.01)
    assert result.calls > 1000 and result.seconds < 1e-5


def test_it_stops_after_about_the_seconds_given():
    start = time.perf_counter()
    timed(lambda: time.sleep(0.001), seconds=0.2)
    assert time.perf_counter() - start < 1


def test_inputs_take_turns():
    seen = []
    timed(lambda x, y: seen.append((x, y)), [(1, 2), (3, 4), (5, 6)], seconds=1e-4)
    assert seen[:7] == [(1, 2), (3, 4), (5, 6), (1, 2), (3, 4), (5, 6), (1, 2)]


def test_flushing_writes_over_the_cache_each_time(monkeypatch):
    flushes, calls = [], []
    monkeypatch.setattr(bench, "_flusher", lambda device: lambda: flushes.append(len(calls)))
    timed(lambda: calls.append(1), flush=True, seconds=1e-6)
    assert len(flushes) == bench.FEWEST and len(set(flushes)) == bench.FEWEST


def test_the_flusher_of_a_cpu_is_larger_than_its_cache(monkeypatch):
    monkeypatch.setattr(bench, "CPU_CACHE", 1000)
    buffer = bench._flusher(torch.device("cpu")).__self__
    assert buffer.numel() == 4000
    bench._flusher(torch.device("cpu"))()


@pytest.mark.parametrize("function, said", [
    (None, "NoneType"), (3, "int"), (torch.ones(2), "Tensor"),
    (lambda: (i for i in range(3)), "run none of its body"),
    (lambda: ThreadPoolExecutor(1).submit(int), "still to be waited for")])
def test_what_cannot_be_timed_is_refused(function, said):
    with pytest.raises(ValueError, match=said):
        timed(function)


def test_a_coroutine_is_refused_without_a_warning():
    async def later():
        return 1
    with pytest.raises(ValueError, match="later returns a coroutine"):
        timed(later)
    gc.collect()  # pytest turns "was never awaited" into an error


def test_a_child_process_nobody_waited_for_is_refused():
    children = []

    def start():
        children.append(subprocess.Popen([sys.executable, "-c", ""]))
        return children[-1]

    with pytest.raises(ValueError, match="start returns a Popen"):
        timed(start)
    children[0].wait()


@pytest.mark.parametrize("inputs", [[], torch.ones(3), [torch.ones(3)], 5, None])
def test_wrong_inputs_are_named(inputs):
    with pytest.raises(ValueError, match="list of argument tuples"):
        timed(lambda *a: None, inputs)


def test_a_device_that_cannot_be_waited_for_is_refused():
    x = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="cannot wait for a tensor on meta"):
        timed(lambda: x + 1)
    with pytest.raises(ValueError, match="cannot wait for a tensor on meta"):
        timed(lambda x: None, [(x,)])


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_must_be_positive(seconds):
    with pytest.raises(ValueError, match="must be positive"):
        timed(lambda: None, seconds=seconds)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        timed(lambda: None, graph=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_everything_as_it_was(error):
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == bench.WARM_UPS + 5:
            raise error

    assert gc.isenabled()
    with pytest.raises(error):
        timed(interrupted, seconds=10)
    assert gc.isenabled()
    assert timed(lambda: time.sleep(0.002), seconds=0.01).seconds < 0.1


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        timed(lambda: None, seconds=1e-3)
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- refusing the impossible (A10, A13)

WORK, T4_PEAK = 2 * 4096**3, 65e12


def test_a_matmul_in_less_than_the_peak_allows_is_refused():
    with pytest.raises(ValueError, match=r"3e-05 s means 4.58e\+15 FLOP/s.*at least 0.00211 s"):
        refuse_above_peak(0.03e-3, flops=WORK, peak=T4_PEAK)
    refuse_above_peak(2.115e-3, flops=WORK, peak=T4_PEAK)  # just possible
    with pytest.raises(ValueError):
        refuse_above_peak(2.114e-3, flops=WORK, peak=T4_PEAK)
    refuse_above_peak(0.03e-3, flops=WORK)  # no peak known: nothing to say


def test_bytes_faster_than_the_memory_are_refused():
    with pytest.raises(ValueError, match="came from a cache"):
        refuse_above_peak(1e-3, nbytes=1e9, bandwidth=320e9)
    refuse_above_peak(1e-2, nbytes=1e9, bandwidth=320e9)


@pytest.mark.parametrize("seconds", [0, -1e-3, float("nan")])
def test_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="nothing was measured"):
        refuse_above_peak(seconds)


def test_the_timer_refuses_what_was_not_waited_for():
    with ThreadPoolExecutor(1) as pool:
        forgets = lambda: bool(pool.submit(time.sleep, 0.001))  # noqa: E731
        with pytest.raises(ValueError, match="above the peak"):
            timed(forgets, flops=1e6, peak=1e9, seconds=1e-3)
        waits = lambda: pool.submit(time.sleep, 0.001).result()  # noqa: E731
        assert timed(waits, flops=1e6, peak=1e9, seconds=1e-3).seconds >= 0.001


def test_mfu_divides_by_all_gpus():
    flops = 6 * 7e10 * 2048 * 16 * 500
    assert mfu(flops, 13.5 * 3600, 312e12, gpus=16) == pytest.approx(0.0284, abs=5e-5)
    assert mfu(flops, 13.5 * 3600, 312e12) == pytest.approx(0.454, abs=5e-4)  # the published slip


@pytest.mark.parametrize("arguments, said", [
    ((0, 1, 1), "model_flops"), ((1, 0, 1), "seconds"), ((1, 1, -1), "peak"),
    ((1, 1, 1, 0), "gpus"),
    ((1, float("nan"), 1), "seconds"), ((2e15, 1, 1e15), "above 1")])
def test_an_impossible_mfu_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        mfu(*arguments)


# ---- rotating

def test_rotating_exceeds_the_cache(monkeypatch):
    monkeypatch.setattr(bench, "CPU_CACHE", 1000)
    sets = rotating(lambda: (torch.ones(100), 3))
    assert len(sets) == 10 and len({x.data_ptr() for x, _ in sets}) == 10


@pytest.mark.parametrize("make", [lambda: torch.ones(3), lambda: (), lambda: (1, 2), lambda: None])
def test_rotating_needs_tensors(make):
    with pytest.raises(ValueError, match="tuple with a tensor"):
        rotating(make)


# ---- traffic

def traffic(function, *inputs):
    with Traffic() as seen:
        function(*inputs)
    return seen.ops, seen.bytes


@pytest.mark.parametrize("function, ops, nbytes", [
    (lambda x: x + 1, ["add"], 8), (lambda x: x * x, ["mul"], 12),
    (lambda x: x.add_(1), ["add_"], 8), (lambda x: x.zero_(), ["zero_"], 4),
    (lambda x: x.copy_(x + 1), ["add", "copy_"], 8 + 8),
    (lambda x: torch.add(x, x, out=torch.empty_like(x)), ["add"], 12),
    (lambda x: x.view(10, 10).t()[1:].detach(), [], 0),
    (lambda x: torch.empty_like(x), [], 0),
    (lambda x: x + torch.ones(()).expand(100), ["ones", "add"], (4 + 8 * 100 + 4) / 100),
    (lambda x: torch._foreach_add_([x, x.clone()], 1), ["clone", "_foreach_add_"], 8 + 16),
    (lambda x: x.bfloat16(), ["_to_copy"], 6)])
def test_traffic_counts_operands_and_results(function, ops, nbytes):
    assert traffic(function, torch.ones(100)) == (ops, nbytes * 100)


# ---- a dataset that workers can find (A14)

def test_spawned_workers_find_the_packages_dataset():
    loader = torch.utils.data.DataLoader(Sleepy(8, 0.0), batch_size=4, num_workers=1,
                                         multiprocessing_context="spawn")
    assert torch.cat(list(loader)).tolist() == list(range(8))


def test_sleepy_is_a_sequence_that_takes_its_time():
    start = time.perf_counter()
    assert list(Sleepy(3, 0.01)) == [0, 1, 2] and time.perf_counter() - start >= 0.03
    with pytest.raises(IndexError):
        Sleepy(3, 0)[3]


# ---- a GPU that is simulated: launches return at once, kernels run in order on its own clock

class FakeGpu:
    """Just enough of torch.cuda, on a virtual clock, for the timer to run against."""

    def __init__(self, kernel=1e-3, launch=1e-5, l2=0.25e-3):
        self.host = self.done = 0.0
        self.kernel, self.launch, self.l2 = kernel, launch, l2
        self.cold, self.capturing, self.syncs = True, None, 0

    def run(self, seconds):
        self.done = max(self.done, self.host) + seconds

    def call(self):
        """The function to time: 1 ms, or a quarter of it when its data is in the L2 cache."""
        if self.capturing is not None:
            self.capturing.append(self.kernel)
            return
        self.host += self.launch
        self.run(self.kernel if self.cold else self.l2)
        self.cold = False

    def flush(self):
        self.host += self.launch
        self.run(5e-4)
        self.cold = True

    def synchronize(self, *_):
        self.syncs += 1
        self.host = max(self.host, self.done)


@pytest.fixture
def fake(monkeypatch):
    gpu = FakeGpu()

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = gpu.done = max(gpu.done, gpu.host)

        def elapsed_time(self, end):
            assert gpu.host >= end.at, "read before the device was there"
            return (end.at - self.at) * 1e3

    class CUDAGraph:
        def replay(self):
            gpu.host += gpu.launch
            for seconds in self.kernels:
                gpu.run(seconds)

    class Capture:
        def __init__(self, graph):
            self.graph = graph

        def __enter__(self):
            gpu.capturing = []

        def __exit__(self, *_):
            self.graph.kernels, gpu.capturing = gpu.capturing, None

    cuda = torch.cuda
    for name, value in dict(Event=Event, CUDAGraph=CUDAGraph, graph=Capture,
                            synchronize=gpu.synchronize, is_initialized=lambda: True,
                            get_device_name=lambda device=None: "Tesla T4").items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(bench, "_flusher", lambda device: gpu.flush)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: gpu.host)
    return gpu


def test_events_time_the_device_with_a_cold_cache(fake):
    result = timed(fake.call, device="cuda")
    assert result.seconds == pytest.approx(1e-3) and result.spread == pytest.approx(0)


def test_without_a_flush_the_cache_answers(fake):
    assert timed(fake.call, device="cuda", flush=False).seconds == pytest.approx(0.25e-3)


def test_the_hosts_clock_waits_for_the_device(fake):
    fake.l2 = fake.kernel
    assert timed(fake.call, device="cpu").seconds == pytest.approx(1e-3, rel=0.05)


def test_work_left_by_others_is_not_timed(fake):
    fake.run(5.0)
    result = timed(fake.call, device="cuda")
    assert result.first < 0.01 and result.seconds == pytest.approx(1e-3)


def test_the_flush_hides_the_launch_of_a_short_kernel(fake):
    fake.kernel = fake.l2 = 2e-6
    assert timed(fake.call, device="cuda").seconds == pytest.approx(2e-6)
    assert timed(fake.call, device="cuda", flush=False).seconds == pytest.approx(1e-5, rel=0.3)


def test_a_graph_has_no_launches_between_its_kernels(fake):
    fake.kernel = fake.l2 = 2e-6
    result = timed(fake.call, device="cuda", graph=True)
    assert result.seconds == pytest.approx(2e-6)


def test_a_t4_is_held_to_its_own_peak(fake):
    fake.kernel = fake.l2 = 0.03e-3
    with pytest.raises(ValueError, match=r"above the peak of 6.5e\+13"):
        timed(fake.call, device="cuda", flops=WORK, format="fp16")
    with pytest.raises(ValueError, match=r"above the peak of 3.2e\+11"):
        timed(fake.call, device="cuda", nbytes=1e9)
    assert timed(fake.call, device="cuda", flops=WORK, format="fp16", peak=1e16).seconds > 0
    with pytest.raises(ValueError, match="no 'fp8' peak"):
        timed(fake.call, device="cuda", flops=WORK, format="fp8")


def test_a_gpu_without_a_row_has_no_peak(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Unknown 9000")
    fake.kernel = fake.l2 = 1e-9
    assert timed(fake.call, device="cuda", flops=WORK).seconds > 0


def test_an_rtx_card_may_clock_above_its_data_sheet(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GeForce RTX 4090")
    fake.kernel = fake.l2 = WORK / 175e12  # its data sheet has 165.2
    assert timed(fake.call, device="cuda", flops=WORK, format="fp16").seconds > 0
    fake.kernel = fake.l2 = WORK / 195e12
    with pytest.raises(ValueError, match="above the peak"):
        timed(fake.call, device="cuda", flops=WORK, format="fp16")


# Each breaks the timer once: were the test blind to it, the timer could lose that part unseen.
@pytest.mark.parametrize("lost", ["synchronize", "flush"])
def test_a_timer_that_lost_a_part_is_wrong_here(fake, monkeypatch, lost):
    if lost == "synchronize":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        with pytest.raises(AssertionError, match="before the device was there"):
            timed(fake.call, device="cuda")
        fake.l2 = fake.kernel
        assert timed(fake.call, device="cpu").seconds < 0.1 * fake.kernel
    else:
        monkeypatch.setattr(bench, "_flusher", lambda device: None)
        assert timed(fake.call, device="cuda").seconds < 0.5 * fake.kernel
