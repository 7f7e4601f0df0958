"""A timer that is hard to fool, and the arithmetic that catches it when it is.

    from companion.bench import timed, rotating
    t = timed(lambda: a @ b, flops=2 * n**3, format="fp16")
    t.seconds, t.low, t.high          # median, 20th and 80th percentile, per call
    t.first                           # the first call, with what it compiled

The first call stands apart; then come untimed calls. The device is idle before the clock
starts and again before it stops. On a GPU the L2 cache is overwritten before each call. A
result above the device's peak is refused: something was not waited for.

Limits: kernels shorter than a launch need ``graph=True``. Temperature and clocks are as they
are, so compare in one run and in turns. Inputs of zeros are faster than data on a GPU.

Taught in: chapters/profiling.
"""
import gc
import inspect
import itertools
import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .counting import storage_bytes
from .hardware import gpu

CPU_CACHE = 64 * 2**20  # bytes; a core's share of the last-level cache is rarely larger
WARM_UPS = 3
FEWEST, MOST = 5, 1000  # timed blocks
SHORTEST = 1e-4         # seconds of a block on a CPU: far above what reading the clock costs
RTX_CLOCK = 1.15        # RTX cards run above the clock for which their data sheets give a peak


@dataclass(frozen=True)
class Timing:
    """Seconds per call of something timed.

    seconds: median; low, high: 20th and 80th percentile; first: the first call, which pays
    for compilation and initialization; calls: how many were timed.
    """
    seconds: float
    low: float
    high: float
    first: float
    calls: int

    @property
    def spread(self):
        """(high - low) / seconds: a smaller difference must recur in turns to be believed."""
        return (self.high - self.low) / self.seconds


def timed(function, inputs=((),), *, device=None, seconds=0.3, flush=None, graph=False,
          flops=None, nbytes=None, format=None, peak=None, bandwidth=None):
    """How long ``function(*arguments)`` takes, as a ``Timing``.

    inputs: a list of argument tuples, used in rotation (see ``rotating``); device: where it
    works, by default where the tensors of its arguments or its result lie, else the CPU, whose
    clock is right for all devices but includes the launch; seconds: about how long to time;
    flush: overwrite the cache before each call, by default on CUDA only; graph: capture the
    calls in a CUDA graph and time its replay.
    flops, nbytes: work of one call and bytes it must move; refused above ``peak`` [FLOP/s] and
    ``bandwidth`` [byte/s], by default those of this GPU in ``format``, if ``companion.hardware``
    has it.

    Raises ValueError for what cannot be timed (no function, a generator, a future nobody
    waited for, tensors that are neither on CUDA nor on the CPU), for a rate above the peak,
    and for a graph without a GPU.
    """
    _require_function(function)
    inputs = _argument_tuples(inputs)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timed: seconds must be positive, got {seconds!r}")
    call = _cycling(function, inputs)
    _synchronize()
    start = time.perf_counter()
    result = call()
    _require_result(function, result)
    _synchronize()
    first = time.perf_counter() - start
    device = torch.device(device) if device is not None else _device_of(inputs, result)
    del result
    if graph and device.type != "cuda":
        raise ValueError(f"timed: graph=True needs a CUDA device, not {device.type}")
    for _ in range(WARM_UPS):
        call()
    on_gpu = device.type == "cuda"
    flush = on_gpu and not graph if flush is None else flush
    with _no_garbage_collection():
        if graph:
            times, calls = _replays(call, len(inputs), seconds)
        elif on_gpu:
            times, calls = _events(call, seconds, _flusher(device) if flush else None)
        else:
            times, calls = _wall_clock(call, seconds, _flusher(device) if flush else None)
    low, high = (statistics.quantiles(times, n=5)[i] for i in (0, -1))
    middle = statistics.median(times)
    peak, bandwidth = _limits(device, format, peak, bandwidth)
    refuse_above_peak(middle, flops=flops, peak=peak, nbytes=nbytes, bandwidth=bandwidth)
    return Timing(middle, low, high, first, calls)


def refuse_above_peak(seconds, *, flops=None, peak=None, nbytes=None, bandwidth=None):
    """Raise ValueError if ``flops`` or ``nbytes`` in ``seconds`` are more than a device can do.

    flops [FLOP] against peak [FLOP/s], nbytes [byte] against bandwidth [byte/s]; a pair with
    a None is not checked. A time that is not above zero is refused as well.
    """
    if not seconds > 0:
        raise ValueError(f"a time of {seconds!r} s is no time: nothing was measured")
    for amount, limit, unit, why in (
            (flops, peak, "FLOP/s", "something was not waited for, or the work is counted wrongly"),
            (nbytes, bandwidth, "B/s", "the data came from a cache, or was not waited for")):
        if amount is not None and limit is not None and amount / seconds > limit:
            raise ValueError(
                f"{seconds:.3g} s means {amount / seconds:.3g} {unit}, above the peak of "
                f"{limit:.3g} {unit} (at least {amount / limit:.3g} s): {why}")


def mfu(model_flops, seconds, peak, gpus=1):
    """Model FLOPs utilization: the share of the dense peak of all ``gpus`` that did model work.

    model_flops: what the mathematics needs, recomputation left out [FLOP]; peak: of one GPU
    [FLOP/s]. Raises ValueError for numbers that are not positive, and for a result above 1.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    given = {"model_flops": model_flops, "seconds": seconds, "peak": peak, "gpus": gpus}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"mfu: {name} must be positive, got {value!r}")
    share = model_flops / (seconds * peak * gpus)
    if share > 1:
        raise ValueError(f"mfu: {share:.3g} is above 1; is {peak:.3g} FLOP/s the peak of one "
                         f"of {gpus} GPUs?")
    return share


def rotating(make, device="cpu", caches=4):
    """Enough argument tuples ``make()`` that none is in cache when its turn comes again.

    make: returns a tuple of arguments, some of them tensors; caches: together they hold at
    least this many times the cache of ``device``. Raises ValueError if ``make`` returns no
    tuple with a tensor.
    """
    first = make()
    nbytes = storage_bytes(_tensors(first)) if isinstance(first, tuple) else 0
    if not nbytes:
        raise ValueError("rotating: make() must return a tuple with a tensor, "
                         f"got {type(first).__name__}")
    count = math.ceil(caches * cache_bytes(device) / nbytes)
    return [first] + [make() for _ in range(count - 1)]


def cache_bytes(device="cpu"):
    """Bytes of the last cache before memory: a GPU's L2, or ``CPU_CACHE``."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU_CACHE
    return torch.cuda.get_device_properties(device).L2_cache_size


class Traffic(TorchDispatchMode):
    """Operations that run under it, and the bytes each reads and writes if nothing is fused.

        with Traffic() as traffic:
            function(x)
        traffic.ops, traffic.bytes     # a list of names, and their sum in bytes

    Each operand is read once and each result written once; an operand that is broadcast counts
    what is stored. Operations that only make a view move nothing and are left out.
    Taught in: chapters/profiling.
    """

    def __init__(self):
        super().__init__()
        self.ops, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [(a, args[i] if i < len(args) else kwargs.get(a.name))
                 for i, a in enumerate(func._schema.arguments)]
        operands = [t for _, value in given for t in _tensors(value)]
        changed = [t for a, value in given if _is_written(a) for t in _tensors(value)]
        read = [t for a, value in given for t in _tensors(value)
                if not (a.is_out or _is_written(a) and name in _ONLY_WRITES)]
        new = _outside(_tensors(out), operands)
        is_view = _tensors(out) and not new and not changed
        if not is_view and name not in _ALLOCATES:
            self.ops.append(name)
            self.bytes += sum(map(_stored_bytes, read + changed + new))
        return out


class Sleepy:
    """A dataset of ``count`` items that each take ``seconds`` to load; item i is i.

    It lives in a module, where a worker process finds it: a class of the notebook it would not.
    """

    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        time.sleep(self.seconds)
        return i


def _tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ONLY_WRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}  # what is there is not read


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _outside(tensors, others):
    """Those of ``tensors`` that share no storage with ``others``."""
    known = {t.untyped_storage()._cdata for t in others}
    return [t for t in tensors if t.untyped_storage()._cdata not in known]


def _stored_bytes(t):
    """Bytes of a tensor that are stored: an expanded dimension (stride 0) counts once."""
    return t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride()) if step or not n)


def _require_function(function):
    if not callable(function):
        raise ValueError(f"timed: needs a function to call, got {type(function).__name__}: "
                         f"{function!r:.60}")


def _argument_tuples(inputs):
    """inputs as a list; a bare tensor or a list of tensors is a common slip."""
    try:
        found = [] if isinstance(inputs, torch.Tensor) else list(inputs)
    except TypeError:
        found = []
    if not found or not all(isinstance(arguments, (tuple, list)) for arguments in found):
        raise ValueError("timed: inputs is a list of argument tuples, such as [(x, w)], "
                         f"got {type(inputs).__name__}")
    return found


def _require_result(function, result):
    """Calling a generator function runs none of its body; a future is not done yet."""
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isgenerator(result) or inspect.iscoroutine(result) or inspect.isasyncgen(result):
        getattr(result, "close", bool)()  # else Python warns that it never ran
        raise ValueError(f"timed: {name} returns a {type(result).__name__}: "
                         "calling it has run none of its body")
    if not isinstance(result, torch.Tensor) and any(
            callable(getattr(result, waits, None)) for waits in ("result", "wait")):
        raise ValueError(f"timed: {name} returns a {type(result).__name__}, which is still to be "
                         "waited for; wait for it in the function")


def _device_of(inputs, result):
    """The first CUDA device among the tensors, else the CPU; no others can be waited for."""
    places = [t.device for t in _tensors((inputs, result))]
    for place in places:
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"timed: cannot wait for a tensor on {place}, only on cuda or cpu")
    return next((place for place in places if place.type == "cuda"), torch.device("cpu"))


def _cycling(function, inputs):
    turns = itertools.cycle(inputs)
    return lambda: function(*next(turns))


def _synchronize():
    """Wait for all that was launched on CUDA, by whomever; elsewhere nothing is open."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _no_garbage_collection:
    """Off while timing, and back as it was, also after Ctrl-C."""

    def __enter__(self):
        self.was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_):
        if self.was_on:
            gc.enable()


def _flusher(device):
    """A function that overwrites the caches of ``device``."""
    nbytes = 4 * cache_bytes(device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device).zero_


def _block(call, count):
    """Seconds of ``count`` calls, launches and the wait for the last one included."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize()
    return time.perf_counter() - start


def _how_many(seconds, each):
    return max(FEWEST, min(MOST, int(seconds / max(each, 1e-9))))


def _wall_clock(call, seconds, flush):
    """Blocks of calls by the host's clock, each long enough for it; one call each if flushed."""
    count = 1
    while not flush and count < 2**20 and (spent := _block(call, count)) < SHORTEST:
        count = max(2 * count, min(1024 * count, int(count * SHORTEST / max(spent, 1e-9))))
    blocks = _how_many(seconds, _block(call, count))
    times = []
    for _ in range(blocks):
        if flush:
            flush()
        times.append(_block(call, count) / count)
    return times, blocks * count


def _event_pair():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _events(call, seconds, flush):
    """Each call between two events. The flush before it gives the host time to run ahead."""
    count = _how_many(seconds, _block(call, FEWEST) / FEWEST)
    pairs = [_event_pair() for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in pairs:
        if flush:
            flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs], count


def _replays(call, sets, seconds):
    """A CUDA graph of some calls, whole rounds of the inputs; its replays between events."""
    count = sets * max(1, 32 // sets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    times, replays = _events(graph.replay, seconds, None)
    return [t / count for t in times], replays * count


def _limits(device, format, peak, bandwidth):
    """(FLOP/s, byte/s) that a result may not exceed; None where the device is not known."""
    if device.type != "cuda" or (peak is not None and bandwidth is not None):
        return peak, bandwidth
    try:
        row = gpu(torch.cuda.get_device_name(device))
    except ValueError:
        return peak, bandwidth
    fastest = row.peak(format) if format else max(row.peak(f) for f in row.formats())
    clock = RTX_CLOCK if row.name.startswith("RTX") else 1
    return peak or clock * fastest, bandwidth or row.hbm_bytes_per_s
