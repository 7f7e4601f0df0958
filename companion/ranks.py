"""``%%torchrun --nproc 4``: run a cell on ranks, through PyTorch's elastic launcher.

    import companion.ranks            # in a notebook: registers the magic

    %%torchrun --nproc 4
    x = torch.arange(4) + rank        # torch, dist, rank, world_size, device are there
    dist.all_reduce(x)
    print(x.tolist())

Each rank is a process with an empty namespace. The process group is made before the cell and
ends with its process: NCCL if every rank has a GPU, gloo otherwise. What the ranks print is shown
when all have ended, sorted by rank. Options:

    --nproc N       how many ranks (1 to 64)
    --with NAMES    names of the notebook that the cell uses, comma-separated: functions and
                    classes travel as source, everything else as a copy
    --get NAMES     names of the cell to bring back: each becomes a list, one value a rank
    --timeout S     seconds after which the ranks are stopped (60)
    --gloo          gloo on the CPU even where there are enough GPUs; the ranks see none of them
    --bare          do not make a process group: the cell does
    --fails         the cell is expected to fail: print how, instead of raising

A cell that fails raises ``RanksFailed``: which rank failed first, after how long, and where.
Beyond one machine use ``torchrun --nnodes`` itself, with the cell as a script.

Limits: POSIX only; ranks compute with one thread each; MOST_SHOWN characters a rank are shown;
a rank asks for a host's name twice, a second each, unless RES_OPTIONS says otherwise; a process
that a rank started and left behind ends with the kernel.
Taught in: chapters/collectives.
"""
import argparse
import ast
import atexit
import contextlib
import inspect
import json
import linecache
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from dataclasses import dataclass
from pathlib import Path

from .ranks_agent import CELL, MOST_OUTPUT, choose_backend, kill
from .report import measured

__all__ = ["Outcome", "RanksFailed", "choose_backend", "run", "torchrun"]

MOST_RANKS = 64
LONGEST_FOLDER = 45  # characters: the fork server's socket lies below, and has 104 to 108 in all
MOST_SHOWN = 20_000  # characters of one rank's output
_LAUNCHER_SETS = re.compile("RANK$|_RANK$|WORLD_SIZE$|MASTER_|TORCHELASTIC_|ROLE_NAME$|PYTHONPATH$")


@dataclass(frozen=True)
class Outcome:
    """What a run on ranks left. Lists have one item a rank.

    stdout, stderr: text; values: {name: list}, of the names asked for; seconds: wall time.
    """
    stdout: list
    stderr: list
    values: dict
    seconds: float


class RanksFailed(RuntimeError):
    """A cell failed on its ranks: the message names the rank that was first, and why.

    rank: that rank, or None if none was; seconds: from the launch to the end;
    stdout, stderr: what each rank had printed; others: a line on every other rank.
    """

    def __init__(self, message, rank, seconds, stdout, stderr, others):
        super().__init__(message)
        self.rank, self.seconds, self.others = rank, seconds, others
        self.stdout, self.stderr = stdout, stderr

    def _render_traceback_(self):
        """For IPython: the frames of the launcher would only hide the message."""
        return [f"RanksFailed: {self}", *self.others]


def run(cell, nproc, *, values=None, sources=None, get=(), timeout=60, backend=None, bare=False):
    """Run the source text ``cell`` on ``nproc`` ranks; return an ``Outcome``.

    values: {name: object} copied to the ranks; sources: {name: source text} executed there
    before the cell; get: names to bring back; timeout: seconds; backend: "gloo", "nccl" or
    None for the one that fits; bare: make no process group.

    Raises RanksFailed, SyntaxError for a cell that cannot be compiled, and ValueError for
    options that cannot be.
    """
    if not 1 <= nproc <= MOST_RANKS:
        raise ValueError(f"run: nproc must be 1 to {MOST_RANKS}, got {nproc!r}")
    if not 0 < timeout <= 3600:
        raise ValueError(f"run: timeout must be above 0 and at most 3600 s, got {timeout!r}")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"run: backend must be gloo, nccl or None, got {backend!r}")
    compile(cell, CELL, "exec", dont_inherit=True)
    pickled = {name: pickle.dumps(value).hex() for name, value in (values or {}).items()}
    environment = {k: v for k, v in os.environ.items() if not _LAUNCHER_SETS.search(k)}
    job = {"cell": cell, "nproc": nproc, "values": pickled, "sources": sources or {},
           "get": list(get), "timeout": timeout, "backend": backend, "bare": bare,
           "cwd": os.getcwd(), "env": environment}
    return _agent().run(job)


# ---------------------------------------------------------------- the agent's other end

class _Agent:
    """The process that launches ranks. One serves a kernel, from its first cell to its end."""

    def __init__(self):
        usual = tempfile.gettempdir()
        place = usual if len(usual) <= LONGEST_FOLDER else "/tmp"
        self.home = Path(tempfile.mkdtemp(prefix="companion-ranks-", dir=place))
        self.count, self.owner = 0, os.getpid()
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        environment = {  # the log level is read when the fork server imports torch, once
            # torch looks up every peer's name; a question that is lost costs 1 s so, not 5
            "RES_OPTIONS": "timeout:1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ,
            "TMPDIR": str(self.home), "PYTHONPATH": path, "PYTHONUTF8": "1"}
        with (self.home / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from companion.ranks_agent import serve; serve()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, encoding="utf-8",
                start_new_session=True, env=environment, cwd=self.home)  # the notebook's may go

    def alive(self):
        return self.process.poll() is None and self.owner == os.getpid()

    def run(self, job):
        self.count += 1
        folder = self.home / str(self.count)
        folder.mkdir()
        started = time.perf_counter()
        try:
            answer = self._ask({**job, "folder": str(folder)})
            return _outcome(job, folder, answer, time.perf_counter() - started)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, message):
        try:
            self._send(message)
            line = self.process.stdout.readline()
        except KeyboardInterrupt:
            self._cancel()
            raise
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        log = (self.home / "log").read_text(errors="replace").strip().splitlines()
        self.end()
        why = log[-1] if log else "no message"
        return {"stopped": f"the launcher itself ended: {why}", "exitcodes": {}}

    def _send(self, message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _cancel(self):
        """After Ctrl-C: ask, and wait for the ranks to be gone; a second Ctrl-C does not ask."""
        ended = False
        try:
            self._send("cancel")
            ended = bool(self.process.stdout.readline())
        except (OSError, KeyboardInterrupt):
            pass
        if not ended:
            self.end()

    def end(self):
        """End the agent and its ranks, and remove their files; at the kernel's exit too."""
        if self.owner != os.getpid() or self.process.stdout.closed:
            return  # a forked child of the kernel owns nothing; an agent that ended is no number
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode:  # it could not end its ranks and its fork server
            files = self.home.glob("[0-9]*/[0-9]*.pid")
            kill({file.name: int(file.read_text()) for file in files}, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGTERM)
        self.process.stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)


_current = None


def _agent():
    global _current
    if os.name != "posix":
        raise ValueError(f"%%torchrun needs Linux or macOS, not {os.name!r}")
    if _current is None or not _current.alive():
        stop()
        _current = _Agent()
    return _current


@atexit.register
def stop():
    """End the agent and its fork server. The next cell starts new ones."""
    global _current
    if _current is not None:
        _current.end()
    _current = None


# ---------------------------------------------------------------- what happened

def _outcome(job, folder, answer, seconds):
    ranks = range(job["nproc"])
    stdout = [_shown(folder / f"{r}.stdout") for r in ranks]
    stderr = [_shown(folder / f"{r}.stderr") for r in ranks]
    ends = {}
    for r in ranks:
        with contextlib.suppress(OSError):
            ends[r] = json.loads((folder / f"{r}.end").read_text(encoding="utf-8"))
    if answer["stopped"] or answer["exitcodes"] or len(ends) < len(ranks):
        where = {r: _where(folder / f"{r}.where") for r in ranks}
        rank, message, others = _cause(job, ends, where, answer, seconds)
        raise RanksFailed(message, rank, seconds, stdout, stderr, others)
    kept = [pickle.loads((folder / f"{r}.values").read_bytes()) for r in ranks]
    return Outcome(stdout, stderr, {name: [k[name] for k in kept] for name in job["get"]}, seconds)


def _shown(path):
    """The text a rank printed, its middle left out where it is too long."""
    if not path.exists():
        return ""
    size, half = path.stat().st_size, MOST_SHOWN // 2
    with path.open("rb") as file:
        if size <= MOST_SHOWN:
            return file.read().decode("utf-8", "replace")
        head = file.read(half).decode("utf-8", "ignore")
        file.seek(size - half)
        tail = file.read().decode("utf-8", "ignore")
    return f"{head}\n... {size - 2 * half:,} bytes more ...\n{tail}"


def _where(path):
    """The cell's line in a stack of faulthandler's; 0: none in the cell, None: no stack."""
    text = path.read_text() if path.exists() else ""
    if not text.strip():
        return None
    found = re.search(rf'File "{re.escape(CELL)}", line (\d+)', text)
    return int(found[1]) if found else 0


def _cause(job, ends, where, answer, seconds):
    """(rank, message, lines on the others) of a job that failed."""
    lines, ranks = job["cell"].splitlines(), range(job["nproc"])
    raised = sorted((end["time"], r) for r, end in ends.items() if end["kind"] == "raised")
    silent = [r for r in ranks if r not in ends and where[r] is None]
    took = f"after {measured(seconds, '.1f', 6)} s"
    told = {r: _state(ends.get(r), where[r], lines) for r in ranks}
    others = [f"  rank {r} {text}" for r, text in told.items()]
    stopped = answer["stopped"]
    if stopped == "timeout" and not [r for _, r in raised if not ends[r]["lost_peer"]]:
        what = f"no end within {job['timeout']:g} s, so the ranks were stopped:"
        return None, "\n".join([what, *others]), []
    if stopped == "output":
        most = MOST_OUTPUT // 2**20
        return None, f"a rank printed more than {most} MiB; the ranks were stopped {took}", others
    if stopped == "start":
        return None, f"the ranks did not start {took}", others
    if silent and all(ends[r]["lost_peer"] for _, r in raised) and stopped in (None, "failed"):
        rank = silent[0]
        how = _exit(answer["exitcodes"].get(str(rank)))
        message = f"rank {rank} of {len(ranks)} failed first, {took}: {how}"
        return rank, message, _without(others, [rank])
    if raised:
        first = ends[raised[0][1]]
        same = [r for _, r in raised if _same(ends[r], first)]
        who = f"rank {same[0]}" if len(same) == 1 else "ranks " + ", ".join(map(str, sorted(same)))
        what = f"{first['type']}: {first['text']}" if first["text"] else first["type"]
        at = f"\n  {_line(first['line'], lines)}" if first["line"] else ""
        message = f"{who} of {len(ranks)} failed first, {took}: {what}{at}"
        return min(same), message, _without(others, same)
    return None, f"the ranks did not run: {stopped or 'no rank said why'} ({took})", others


def _same(a, b):
    return all(a[k] == b[k] for k in ("type", "text", "line"))


def _without(others, ranks):
    return [text for r, text in enumerate(others) if r not in ranks]


def _line(number, lines):
    text = lines[number - 1].strip() if 0 < number <= len(lines) else "?"
    return f"line {number}: {text}"


def _state(end, where, lines):
    if end is None:
        if where is None:
            return "ended without a word"
        return f"was at {_line(where, lines)}" if where else "had not begun, or waited for its GPU"
    if end["kind"] == "done":
        return "had finished"
    return f"raised {end['type']}" + (f" at {_line(end['line'], lines)}" if end["line"] else "")


def _exit(code):
    if code is None:
        return "it ended without a word (killed, out of memory, or os._exit)"
    if code >= 0:
        return f"it left with exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


# ---------------------------------------------------------------- the magic

class _Options(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"%%torchrun: {message}")


def _parse(line):
    parser = _Options(prog="%%torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--with", dest="given", default="")
    parser.add_argument("--get", default="")
    parser.add_argument("--timeout", type=float, default=60)
    for flag in "--gloo", "--bare", "--fails":
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(shlex.split(line))
    for name in "given", "get":
        names = [n.strip() for n in getattr(options, name).split(",") if n.strip()]
        if wrong := [n for n in names if not n.isidentifier()]:
            raise ValueError(f"%%torchrun: {wrong[0]!r} is not a name")
        setattr(options, name, names)
    return options


def _source(value, shell):
    """The source text of a function or class of the notebook."""
    if inspect.isfunction(value):
        return textwrap.dedent(inspect.getsource(value))
    for text in _texts(value, shell):
        for node in _definitions(text):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1:node.end_lineno])
    raise ValueError(f"%%torchrun --with: no cell defines class {value.__name__!r} at its top level")


def _texts(value, shell):
    """Where a class may stand: its methods know their cell. Without any, the latest cell first."""
    for member in vars(value).values():
        function = inspect.unwrap(getattr(member, "__func__", member))  # of a static or class method
        if inspect.isfunction(function) and function.__module__ == "__main__":
            yield "".join(linecache.getlines(function.__code__.co_filename))
    yield from reversed(shell.history_manager.input_hist_parsed)


def _definitions(text):
    try:
        return ast.parse(text).body[::-1]
    except SyntaxError:
        return []


def _taken(names, shell):
    """(values, sources) of the notebook's ``names``."""
    values, sources = {}, {}
    for name in names:
        if name not in shell.user_ns:
            raise ValueError(f"%%torchrun --with: the notebook has no {name!r}")
        value = shell.user_ns[name]
        own = isinstance(value, (types.FunctionType, type)) and value.__module__ == "__main__"
        if own:
            sources[name] = _source(value, shell)
            if value.__name__ not in (name, "<lambda>"):
                sources[name] += f"\n{name} = {value.__name__}"
        else:
            values[name] = value
    return values, sources


def torchrun(line, cell):
    """``%%torchrun --nproc N [options]``: run the cell on N ranks. See the module's text."""
    from IPython import get_ipython
    options = _parse(line)
    shell = get_ipython()
    values, sources = _taken(options.given, shell)
    try:
        outcome = run(cell, options.nproc, values=values, sources=sources, get=options.get,
                      timeout=options.timeout, backend="gloo" if options.gloo else None,
                      bare=options.bare)
    except RanksFailed as failed:
        _show(failed.stdout, [] if options.fails else failed.stderr)
        if not options.fails:
            raise
        print(failed)
        return
    _show(outcome.stdout, outcome.stderr)
    if options.fails:
        raise ValueError("%%torchrun --fails: the cell was expected to fail, and did not")
    shell.user_ns.update(outcome.values)


def _show(stdout, stderr):
    for text in stdout:
        print(text, end="" if text.endswith("\n") or not text else "\n")
    for rank, text in enumerate(stderr):
        for line in text.splitlines():
            print(f"rank {rank}: {line}", file=sys.stderr)


def load_ipython_extension(shell):
    """``%load_ext companion.ranks``; importing the module in a notebook does the same."""
    shell.register_magic_function(torchrun, "cell")


def _register():
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython and hasattr(ipython, "get_ipython") else None
    if shell is not None:
        load_ipython_extension(shell)
        _agent()  # importing torch takes it seconds: let that begin now


_register()
