"""The agent and the ranks of ``%%torchrun``: what runs outside the notebook's kernel.

The kernel starts one agent, in a session of its own, so that an interrupted or killed kernel
does not take it along before it has cleaned up. The agent starts a fork server that has torch
imported, then runs PyTorch's elastic launcher once a job: c10d on ``localhost:0``, so the port
is always a free one. Jobs arrive as JSON, a line each, and so do the answers; when the
kernel's end of the pipe closes, the agent kills its ranks, removes its folder and leaves.

A rank leaves one file at its end: ``N.end``, what happened there (JSON). A rank that is told
to stop leaves ``N.where``, the stack it was in, written by C code that a hang cannot hold up.

Taught in: chapters/collectives.
"""
import contextlib
import ctypes
import faulthandler
import json
import linecache
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

CELL = "<cell>"               # the file name of the cell's code in tracebacks
MOST_OUTPUT = 64 * 2**20      # bytes that one rank may print
START_SECONDS = 60            # for ranks to start, before the time-out of the cell counts
_TICK = 0.02                  # seconds between two looks at the ranks
_LINGER, _LINGER_LOST = 0.1, 2.0
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.launcher.api", "companion.report"]


def choose_backend(world_size, device_count):
    """``nccl`` if every one of ``world_size`` ranks gets a GPU of its own, else ``gloo``.

    NCCL refuses two ranks on one GPU. Raises ValueError for less than one rank.
    """
    if world_size < 1:
        raise ValueError(f"choose_backend: world_size must be at least 1, got {world_size!r}")
    return "nccl" if device_count >= world_size else "gloo"


# ---------------------------------------------------------------- a rank

def run_rank(job):
    """Run the job's cell on this rank. ``job`` is the dictionary that the kernel sent."""
    _prepare(job)
    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    try:
        _execute(job, rank, _join_group(job))
        _write(folder / f"{rank}.end", {"kind": "done", "time": time.time_ns()})
        # Groups end with their process, by os._exit. To destroy one costs half a second with
        # NCCL, and with gloo and torch 2.6 a busy machine hung in it now and then.
        _wait_for_all(folder, job["nproc"])
    except BaseException as error:
        end = _described(error)
        _write(folder / f"{rank}.end", {**end, "time": time.time_ns()})
        # Ranks that fail for the same reason shall all be heard; a rank that lost a peer
        # waits until the launcher has seen the peer's end, which is the cause.
        time.sleep(_LINGER_LOST if end["lost_peer"] else _LINGER)
        sys.stdout.flush()
        os._exit(1)


def _prepare(job):
    rank, folder = os.environ["RANK"], Path(job["folder"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no life without the server
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # ends a rank that hangs in C code too
    where = open(folder / f"{rank}.where", "w")     # kept open: faulthandler holds its number
    faulthandler.register(signal.SIGTERM, file=where, all_threads=True, chain=True)
    run_rank.where = where
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")
    _write(folder / f"{rank}.pid", os.getpid())
    os.environ.update(job["env"])
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":  # the host's name may lead nowhere
        os.environ.setdefault(name, loopback)
    if job["backend"] == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the first backward starts a thread a GPU
    os.chdir(job["cwd"])
    import torch
    torch.set_num_threads(1)  # many ranks share the machine, and sums keep their order
    _make_deprecations_errors()


def _make_deprecations_errors():
    """What torch will remove must not enter a chapter; ``__main__`` is the cell.

    Where the book is checked, so are warnings that torch's wrappers lay to torch's own account.
    A reader with a newer torch sees those, and the cell goes on.
    """
    modules = ["__main__"] + [r"torch($|\.)"] * (os.environ.get("COMPANION_STRICT") == "1")
    for module in modules:
        for category in DeprecationWarning, FutureWarning, PendingDeprecationWarning:
            warnings.filterwarnings("error", category=category, module=module)
    warnings.filterwarnings("error", "(?s).*deprecated", UserWarning, "__main__")


def _join_group(job):
    """Make the process group; return what a cell finds: torch, dist, rank, world_size, device."""
    import datetime

    import torch
    import torch.distributed as dist
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = job["backend"] or choose_backend(size, torch.cuda.device_count())
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    names = {"torch": torch, "dist": dist, "rank": rank, "world_size": size, "device": device}
    if not job["bare"]:
        # Longer than the launcher's own time-out, which can say where every rank was.
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=job["timeout"] + 10),
                                device_id=device if backend == "nccl" else None)
    return names


def _execute(job, rank, names):
    main = sys.modules["__main__"]
    main.__dict__.update(names, __name__="__main__")
    for name, pickled in job["values"].items():
        main.__dict__[name] = pickle.loads(bytes.fromhex(pickled))
    for name, source in [*job["sources"].items(), (None, job["cell"])]:
        file = f"<{name}>" if name else CELL
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec", dont_inherit=True), main.__dict__)
    if names["torch"].cuda.is_initialized():
        names["torch"].cuda.synchronize()  # peers get what was sent; a late error is heard
    kept = {}
    for name in job["get"]:
        if name not in main.__dict__:
            raise NameError(f"--get {name}: rank {rank} has no such name at the end of the cell")
        value = main.__dict__[name]
        kept[name] = value.detach().cpu() if hasattr(value, "detach") else value
    (Path(job["folder"]) / f"{rank}.values").write_bytes(pickle.dumps(kept))


def _wait_for_all(folder, nproc):
    """Keep connections open until all are done: a rank that is early must not look dead."""
    while sum((folder / f"{r}.end").exists() for r in range(nproc)) < nproc:
        time.sleep(0.005)


_LOST = re.compile("connection|closed|reset|timed? ?out|peer|socket|broken pipe|nccl", re.I)


def _described(error):
    """An exception as JSON: its name, its text, and the cell's line it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in frames if f.filename == CELL), None)
    text = str(error)
    lost = isinstance(error, (RuntimeError, OSError)) and bool(_LOST.search(text)) \
        and bool(frames) and "torch" in frames[-1].filename
    return {"kind": "raised", "type": type(error).__name__, "text": text[:4000], "line": line,
            "lost_peer": lost}


def _write(path, content):
    """In one step: a reader sees the whole file or none."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


# ---------------------------------------------------------------- the agent

class _Job:
    """A job that runs, with the thread that stops it when it must not go on."""

    def __init__(self, job):
        self.job, self.folder = job, Path(job["folder"])
        self.over, self.cancelled, self.stopped = threading.Event(), threading.Event(), None
        self.started = self.first_error = None

    def pids(self):
        found = {}
        for rank in range(self.job["nproc"]):
            with contextlib.suppress(OSError, ValueError):
                found[rank] = json.loads((self.folder / f"{rank}.pid").read_text())
        return found

    def reason(self):
        """Why the ranks must be stopped now, or None."""
        now = time.monotonic()
        if self.cancelled.is_set():
            return "cancelled"
        if self.started is None:
            if len(self.pids()) == self.job["nproc"]:
                self.started = now
            elif now - self.created > START_SECONDS:
                return "start"
            return None
        if now - self.started > self.job["timeout"]:
            return "timeout"
        if any(file.stat().st_size > MOST_OUTPUT for file in self.folder.glob("*.std*")):
            return "output"
        if self.first_error is None and any(self.folder.glob("*.end")):
            ends = [json.loads(f.read_text()) for f in self.folder.glob("*.end")]
            if any(end["kind"] != "done" for end in ends):
                self.first_error = now
        if self.first_error is not None and now - self.first_error > _LINGER_LOST + 1:
            return "failed"  # a rank that the launcher could not end
        return None

    def watch(self):
        self.created = time.monotonic()
        while not self.over.wait(_TICK):
            if reason := self.reason():
                self.stopped = reason
                kill(self.pids(), signal.SIGTERM)  # writes N.where, then ends the rank
                grace = _TICK if reason == "cancelled" else 0.5  # nobody asks where it was
                while not self.over.wait(grace):
                    kill(self.pids(), signal.SIGKILL)
                return


def kill(pids, number):
    """Send signal ``number`` to the processes of ``pids``: {rank: process id}."""
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _launch(running):
    """Run one job through the elastic launcher; return what it knows about a failure."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    job, folder = running.job, running.folder

    class Files(LogsSpecs):
        """Every rank's output goes to files of the job's folder."""

        def reify(self, envs):
            def paths(kind):
                return {local: str(folder / f"{env['RANK']}.{kind}") for local, env in envs.items()}
            given = {"stdouts": paths("stdout"), "stderrs": paths("stderr"), "tee_stdouts": {},
                     "tee_stderrs": {}, "error_files": paths("error"),
                     "filtered_stdout": "", "filtered_stderr": ""}  # the last two since torch 2.11
            known = LogsDest.__dataclass_fields__
            return LogsDest(**{k: v for k, v in given.items() if k in known})

        @property
        def root_log_dir(self):
            return str(folder)

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=job["nproc"], run_id=folder.name,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
        rdzv_configs={"timeout": START_SECONDS}, max_restarts=0, monitor_interval=_TICK,
        start_method="forkserver", logs_specs=Files())
    watcher = threading.Thread(target=running.watch, daemon=True)
    watcher.start()
    try:
        elastic_launch(config, run_rank)(job)
        failures = {}
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except BaseException as error:
        failures, running.stopped = {}, running.stopped or f"{type(error).__name__}: {error}"
    finally:
        running.over.set()
        watcher.join()
    return {"exitcodes": failures, "stopped": running.stopped}


def serve():
    """The agent's main loop: a job a line on stdin, an answer a line on stdout."""
    import importlib
    import logging
    home = Path(os.environ["TMPDIR"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints here must not look like an answer
    for module in _PRELOAD:
        importlib.import_module(module)
    _start_fork_server()
    logging.disable()  # torch writes to its log at each launch; tracebacks still come
    _join_at_once()
    jobs = _Inbox(home)
    while (job := jobs.next()) is not None:
        answer = _launch(job)
        with contextlib.suppress(BrokenPipeError):  # the kernel is gone: nobody waits
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the fork server, and what ranks started and left behind
    shutil.rmtree(home, ignore_errors=True)
    os._exit(0)  # tearing torch down takes a second


def _start_fork_server():
    """Fork the server off this process, which has torch imported already.

    multiprocessing would start Python anew, to import torch a second time beside the notebook
    and this process: on two cores the first launch then takes a second longer.
    """
    from multiprocessing import forkserver, resource_tracker, util

    def fork(path, args, passfds):
        if pid := os.fork():
            return pid
        try:
            util.spawnv_passfds = start  # ranks get multiprocessing as a new process has it:
            forkserver._forkserver.__init__()  # here its lock is held, and the tracker's
            resource_tracker._resource_tracker.__init__()  # process looks like a child
            for fd in map(int, os.listdir("/dev/fd")):
                if fd > 2 and fd not in passfds:
                    with contextlib.suppress(OSError):  # the number that listed them
                        os.close(fd)
            exec(args[-1], {})  # what ``python -c`` would run: the server's loop
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)

    forkserver.set_forkserver_preload(_PRELOAD)  # for a server that replaces a killed one
    resource_tracker.ensure_running()  # the usual way: it needs no torch
    start, util.spawnv_passfds = util.spawnv_passfds, fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start


def _join_at_once():
    """Leave out what the rendezvous of many nodes does, and one node need not wait for.

    Nodes join after 0 to 0.3 s at random, to spare their store. And each step looks up the name
    of its method for a log, by inspecting the whole stack: 60 ms a launch.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    if wait := getattr(dynamic_rendezvous, "_delay", None):
        dynamic_rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else wait(seconds)
    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = lambda depth=2: ""


class _Inbox:
    """Reads stdin on a thread, so that a cancel or the kernel's death is seen at any time."""

    def __init__(self, home):
        import queue
        self.home, self.latest, self.queue = home, None, queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self):
        return self.queue.get()

    def _read(self):
        with contextlib.suppress(ValueError):  # a kernel can be interrupted in the middle of a line
            for line in sys.stdin:
                message = json.loads(line)
                if message != "cancel":
                    self.latest = _Job(message)
                    self.queue.put(self.latest)
                elif self.latest is not None:
                    self.latest.cancelled.set()
        running = self.latest
        if running is not None and not running.over.is_set():  # the kernel is gone: so are its ranks
            running.cancelled.set()
            kill(running.pids(), signal.SIGKILL)
            running.over.wait(5)
        self.queue.put(None)
        time.sleep(5)  # the main thread leaves by itself, unless it hangs
        shutil.rmtree(self.home, ignore_errors=True)
        os.killpg(0, signal.SIGTERM)
