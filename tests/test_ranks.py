"""``%%torchrun``: every way a cell on ranks can end, and what it leaves behind."""
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: E402

from companion import ranks, ranks_agent  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
QUICK = 20  # seconds: far above what a failure takes on a busy machine, far below the time-out


def run(cell, nproc=4, **options):
    return ranks.run(textwrap.dedent(cell), nproc, backend="gloo", **options)


def failed(cell, nproc=4, **options):
    with pytest.raises(ranks.RanksFailed) as caught:
        run(cell, nproc, **options)
    return caught.value


# ---------------------------------------------------------------- what works

@pytest.mark.parametrize("world, gpus, backend",
                         [(2, 1, "gloo"), (2, 2, "nccl"), (2, 0, "gloo"), (1, 1, "nccl"), (4, 2, "gloo")])
def test_backend_fits_the_gpus(world, gpus, backend):
    assert ranks.choose_backend(world, gpus) == backend


def test_no_backend_for_no_rank():
    with pytest.raises(ValueError, match="got 0"):
        ranks.choose_backend(0, 1)


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_ranks_meet_and_output_is_sorted(nproc):
    # The last rank prints first; the group is really one group.
    cell = """
        import time
        x = torch.arange(4) + rank
        dist.all_reduce(x)
        time.sleep(0.05 * (world_size - rank))
        print(rank, x.tolist())
    """
    total = [nproc * i + nproc * (nproc - 1) // 2 for i in range(4)]
    for _ in range(2):  # the same again, on a port that is free
        assert run(cell, nproc).stdout == [f"{r} {total}\n" for r in range(nproc)]


def test_values_come_back_by_rank_and_go_there():
    outcome = run("mine = torch.tensor([n + rank])\nback = shout('a')", 2, values={"n": 40},
                  sources={"shout": "def shout(s):\n    return s.upper() + str(rank)\n"}, get=["mine", "back"])
    assert [x.tolist() for x in outcome.values["mine"]] == [[40], [41]]
    assert outcome.values["back"] == ["A0", "A1"]


def test_a_cell_starts_from_nothing():
    run("left = 1", 1)
    assert run("print('left' in globals())", 1).stdout == ["False\n"]


def test_folder_and_environment_are_the_notebooks(tmp_path, monkeypatch):
    run("pass", 1)  # the agent is older than what follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOOK_TEST", "seen")
    monkeypatch.setenv("RANK", "7")  # a stray one must not confuse the launcher
    printed = run("import os; print(os.getcwd(), os.environ['BOOK_TEST'], rank)", 1).stdout
    assert printed == [f"{tmp_path} seen 0\n"]


def test_one_thread_a_rank_and_text_of_any_kind():
    assert run("print(torch.get_num_threads(), '✓ ‹1›')", 2).stdout == ["1 ✓ ‹1›\n"] * 2


def test_a_later_launch_is_cheaper_than_importing_torch():
    # Catches ranks that import torch anew, as with start_method "spawn".
    run("pass")
    launches = [run("dist.barrier()").seconds for _ in range(3)]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    assert min(launches) < time.perf_counter() - started


# Catches ranks on the CPU that start the GPU: their first backward then takes a tenth of a second.
def test_ranks_on_the_cpu_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run("import os; seen = os.environ['CUDA_VISIBLE_DEVICES']", 2, get=["seen"]).values["seen"] == ["", ""]


# Catches patches that no longer fit how elastic calls for a wait and a name, or that drop all waits.
def test_only_the_wait_at_random_and_names_for_logs_are_left_out(monkeypatch):
    waited = []
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: waited.append(seconds))
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", inspect.stack)
    ranks_agent._join_at_once()
    dynamic_rendezvous._delay(seconds=(0, 0.3))
    dynamic_rendezvous._delay(seconds=1)
    assert waited == [1]
    assert dynamic_rendezvous.get_method_name() == ""
    assert "get_method_name" in dynamic_rendezvous.DynamicRendezvousHandler._record.__code__.co_names


# Catches ranks that hold the fork server's lock (forkserver hangs) or its way of starting it (spawn fails).
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_rank_has_workers_of_its_own(method):
    cell = f"""
        data = torch.utils.data.TensorDataset(torch.arange(4))
        loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="{method}")
        print([int(x) for x, in loader])
    """
    assert run(cell, 2).stdout == ["[0, 1, 2, 3]\n"] * 2


def test_bare_makes_no_group():
    assert run("print(dist.is_initialized())", 1, bare=True).stdout == ["False\n"]


def test_a_rank_that_ends_early_does_not_break_its_peers():
    cell = """
        import time
        pair = dist.new_group([0, 1])
        if rank < 2:
            for _ in range(3):
                time.sleep(0.1)
                dist.all_reduce(torch.ones(1), group=pair)
        print("end")
    """
    assert run(cell).stdout == ["end\n"] * 4


@pytest.mark.parametrize("options, match", [
    ({"nproc": 0}, "got 0"), ({"nproc": 65}, "got 65"), ({"timeout": 0}, "got 0"),
    ({"backend": "mpi"}, "got 'mpi'")])
def test_options_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        ranks.run("pass", **{"nproc": 1, **options})


def test_a_syntax_error_starts_nothing():
    with pytest.raises(SyntaxError):
        run("x = = 1")


# ---------------------------------------------------------------- what fails

def test_the_rank_that_raises_first_is_named():
    error = failed("""
        x = torch.ones(1)
        if rank == 2:
            x = 1 / 0
        dist.all_reduce(x)
    """)
    assert error.rank == 2 and error.seconds < QUICK
    assert re.search(r"rank 2 of 4 failed first, after ‹ *[\d.]+› s: ZeroDivisionError", str(error))
    assert "line 4: x = 1 / 0" in str(error) and len(error.others) == 3


def test_the_same_error_on_all_ranks_is_told_once():
    error = failed("raise ValueError('no good')")
    assert "ranks 0, 1, 2, 3 of 4 failed first" in str(error) and "ValueError: no good" in str(error)


def test_the_first_of_two_errors_is_the_cause():
    error = failed("""
        import time
        time.sleep(0.03 if rank == 3 else 0.08)
        if rank in (1, 3):
            raise ValueError(f"from {rank}")
        dist.barrier()
    """)
    assert error.rank == 3, str(error)


@pytest.mark.parametrize("end, told", [
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL"), ("os._exit(3)", "exit code 3"),
    ("ctypes.string_at(0)", "killed by SIGSEGV")])
def test_a_rank_that_dies_is_the_cause_not_its_peers(end, told):
    error = failed(f"""
        import ctypes, os, time
        dist.barrier()
        if rank == 2:
            {end}
        dist.all_reduce(torch.ones(10))
    """)
    assert error.rank == 2 and told in str(error), str(error)
    assert error.seconds < QUICK


@pytest.mark.parametrize("hang", ["time.sleep(99)", "while True: pass", "dist.recv(torch.ones(1), 0)",
                                  "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_hang_ends_and_says_where(hang):
    error = failed(f"""
        import os, signal, time
        if rank == 1:
            {hang}
        dist.barrier()
    """, 2, timeout=1)
    assert error.rank is None and error.seconds < QUICK
    assert "no end within 1 s" in str(error) and "rank 0 was at line 5: dist.barrier()" in str(error)
    assert ("SIGSTOP" in hang) or f"rank 1 was at line 4: {hang}" in str(error), str(error)


def test_ranks_that_ignore_to_be_told_are_killed():
    error = failed("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(99)", 2, timeout=1)
    assert error.seconds < QUICK


def test_a_rank_too_few_in_a_loop_is_seen_as_finished():
    # D09: unequal numbers of batches. With torch's own time-out this hangs for half an hour.
    error = failed("for _ in range(5 - rank):\n    dist.all_reduce(torch.ones(1))", 2, timeout=1)
    assert "rank 0 was at line 2" in str(error) and "rank 1 had finished" in str(error)


def test_a_missing_peer_is_an_end_within_the_time_out(tmp_path):
    # D03: a group of two that one process makes. By default it waits for half an hour.
    cell = f"dist.init_process_group('gloo', 'file://{tmp_path}/store', rank=0, world_size=2)"
    error = failed(cell, 1, bare=True, timeout=2)
    assert "no end within 2 s" in str(error) and "rank 0 was at line 1" in str(error) and error.seconds < QUICK


def test_megabytes_are_shown_from_both_ends():
    outcome = run("print('head' + 'x' * 3_000_000 + 'tail')", 2)
    for text in outcome.stdout:
        assert text.startswith("head") and text.endswith("tail\n")
        assert "bytes more" in text and len(text) < 1.1 * ranks.MOST_SHOWN


def test_endless_output_is_stopped():
    error = failed("while True: print('x' * 1_000_000)", 1)
    assert "printed more than 64 MiB" in str(error) and error.seconds < 50


def test_what_was_printed_before_a_failure_is_kept():
    error = failed("import os\nprint('so far', rank)\nos._exit(1)", 2)
    assert any("so far" in text for text in error.stdout)


@pytest.mark.parametrize("line", ["torch.cuda.amp.autocast()",
                                  "import warnings; warnings.warn('x is deprecated', DeprecationWarning)"])
def test_deprecations_are_errors(line):
    assert "Warning" in str(failed(line, 1))


@pytest.mark.parametrize("strict", [True, False])
def test_deprecations_laid_to_torch_are_errors_where_the_book_is_checked(strict, monkeypatch):
    # As torch 2.14 does for all_gather_into_tensor: a wrapper's line is named, not the caller's.
    monkeypatch.setenv("COMPANION_STRICT", str(int(strict)))
    cell = """
        import warnings
        warnings.warn_explicit("old", FutureWarning, "c10d_logger.py", 1, module="torch.distributed.c10d_logger")
    """
    if strict:
        assert "FutureWarning: old" in str(failed(cell, 1))
    else:
        assert "FutureWarning: old" in run(cell, 1).stderr[0]


def test_a_name_that_is_not_there_to_get():
    assert "--get x: rank 0" in str(failed("y = 1", 1, get=["x"]))


def test_the_agent_is_replaced_when_it_died():
    run("pass", 1)
    ranks._current.process.kill()
    ranks._current.process.wait()
    assert run("print(rank)", 1).stdout == ["0\n"]


@LINUX
@pytest.mark.parametrize("body", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_killing_the_agent_during_a_cell_is_told_and_ends_its_ranks(tmp_path, body):
    agent = _agent_pid()
    home = ranks._current.home
    (home / "server.pid").write_text("of somebody else")
    cell = f"import os, signal\n{_CHILD}{body}\nif rank: os.kill(agent, signal.SIGKILL)\nwhile True: pass"
    error = failed(cell, 2, values={"agent": agent, "folder": str(tmp_path)})
    assert "launcher itself ended" in str(error) and error.seconds < QUICK
    assert _within(5, lambda: not _processes(home) and not _alive(tmp_path)) and not home.exists()
    assert run("print(rank)", 1).stdout == ["0\n"]


# Catches signals to a number that was an agent's long ago, and is somebody else's process now.
def test_an_agent_is_ended_once(monkeypatch):
    failed("import os, signal\nos.kill(agent, signal.SIGKILL)\nwhile True: pass", 1, values={"agent": _agent_pid()})
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a second signal"))
    ranks.stop()


def _agent_pid():
    run("pass", 1)
    return ranks._current.process.pid


# ---------------------------------------------------------------- what is left

_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "99"])
with open(f"{folder}/part{rank}", "w") as file:
    print(child.pid, file=file)
os.rename(f"{folder}/part{rank}", f"{folder}/child{rank}")
"""


def _alive(folder):
    """Processes that _CHILD left, by their files in ``folder``."""
    pids = [int(file.read_text()) for file in Path(folder).glob("child*")]
    assert pids
    return [pid for pid in pids if _runs(pid)]


def _runs(pid):
    """Is it there, and no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _processes(home):
    """Processes whose environment names folder ``home``: the agent, its server, its ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if _runs(entry.name) and f"TMPDIR={home}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def _tcp_sockets(pid):
    listening = {line.split()[9] for table in ("tcp", "tcp6") if Path(f"/proc/{pid}/net/{table}").exists()
                 for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]}
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            held.add(match[1])
    return held & listening


def _within(seconds, condition):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _shared():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


@LINUX
@pytest.mark.parametrize("cell", ["dist.barrier()", "if rank == 1: raise ValueError\ndist.barrier()"])
def test_between_cells_only_agent_and_server_live(cell):
    try:
        run(cell, 2)
    except ranks.RanksFailed:
        pass
    home = ranks._current.home
    assert _within(5, lambda: len(_processes(home)) <= 3), _processes(home)  # with the resource tracker
    assert all(not _tcp_sockets(pid) for pid in _processes(home))
    assert not list(home.glob("[0-9]*")) and not list(home.rglob("torchelastic*"))


@LINUX
def test_stop_leaves_nothing():
    run("dist.barrier()", 2)
    home = ranks._current.home
    assert _processes(home)  # the search below does find what there is
    ranks.stop()
    assert not home.exists() and _within(5, lambda: not _processes(home))


_SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell's job started us
sys.path.insert(0, {root!r})
from companion import ranks
try:
    ranks.run("print(rank)", 2)
    print(ranks._current.home, flush=True)
    ranks.run({cell!r}, 2, timeout=60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(ranks.run("print(rank)", 2).stdout, flush=True)
"""


@pytest.fixture
def kernel(tmp_path):
    """Starts a process that stands for the kernel, in the middle of a cell; gives it and its folder."""
    started = []

    def start(body="time.sleep(99)"):
        flag = str(tmp_path / "flag")
        cell = f"import time\nopen({flag!r} + str(rank), 'w').close()\n{body}"
        script = _SCRIPT.format(root=str(ROOT), cell=cell)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                                   start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)})
        started.append(process)
        home = Path(process.stdout.readline().strip())
        assert _within(60, lambda: len(list(tmp_path.glob("flag*"))) == 2 or process.poll() is not None)
        assert process.poll() is None
        return process, home
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@LINUX
@pytest.mark.parametrize("body", ["time.sleep(99)", "while True: pass"])
def test_ctrl_c_stops_the_ranks_and_the_next_cell_runs(kernel, body):
    process, home = kernel(body)
    os.killpg(process.pid, signal.SIGINT)  # as Jupyter does
    out, _ = process.communicate(timeout=60)
    assert out.splitlines() == ["interrupted", "['0\\n', '1\\n']"]
    assert _within(10, lambda: not _processes(home) and not home.exists())


@LINUX
@pytest.mark.parametrize("group", [False, True])
def test_a_killed_kernel_leaves_nothing(kernel, group):
    process, home = kernel()
    ours = {p for p in _processes(home)}
    maps = _semaphores_of(ours)
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    assert _within(15, lambda: not _processes(home) and not home.exists()), _processes(home)
    assert _within(5, lambda: not maps & _shared())


# Catches children of ranks, with the resource tracker that waits for them.
@LINUX
def test_what_ranks_started_ends_with_the_kernel(kernel, tmp_path):
    workers = ("import os; folder = " + repr(str(tmp_path)) + "\n" + _CHILD +
               "data = torch.utils.data.TensorDataset(torch.arange(9))\n"
               "for x in torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context='forkserver'):\n"
               "    open(folder + '/at_work' + str(rank), 'w').close()\n    time.sleep(99)")
    process, home = kernel(workers)
    assert _within(30, lambda: len(list(tmp_path.glob("at_work*"))) == 2)
    process.kill()
    assert _within(15, lambda: not _processes(home) and not home.exists() and not _alive(tmp_path))


@pytest.fixture
def young(tmp_path):
    """Starts a process that stands for a kernel, with a first job that waits for torch; gives it and its folder."""
    started = []

    def start(size=0):
        script = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                  f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom companion import ranks\n"
                  f"home = ranks._agent().home\nimport os; os.chdir({str(tmp_path)!r})\n"
                  f"print(home, flush=True)\n"
                  f"ranks.run('import time; time.sleep(99)', 2, values=dict(x=bytes({size})))")
        folder = tmp_path / "works"
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
        started.append(process)
        return process, Path(process.stdout.readline().strip())
    yield start
    for process in started:
        process.kill()
        process.communicate()


@LINUX
def test_a_kernel_killed_before_its_first_job_runs_leaves_nothing(young, tmp_path):
    process, home = young()
    process.kill()
    (tmp_path / "works").rmdir()
    assert _within(20, lambda: not _processes(home) and not home.exists()), _processes(home)


@LINUX
@pytest.mark.parametrize("size", [0, 10**7])
def test_ctrl_c_before_the_first_job_runs_is_heard(young, size):
    process, home = young(size)
    time.sleep(0.5)  # the job is in the pipe, the large one in part
    process.send_signal(signal.SIGINT)
    process.wait(QUICK)
    assert _within(5, lambda: not _processes(home) and not home.exists()), _processes(home)


def _semaphores_of(pids):
    """Names in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            pass
    return found


# ---------------------------------------------------------------- in a notebook

_EXECUTE = """
import sys, nbclient, nbformat
nb = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(nb, timeout=120, kernel_name="python3", allow_errors=True).execute()
nbformat.write(nb, sys.argv[1])
"""


def _notebook(tmp_path, cells):
    """The notebook of these cells, executed, in a process of its own: old clients warn at their end."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    path = tmp_path / "nb.ipynb"
    nbformat.write(nb, path)
    subprocess.run([sys.executable, "-W", "ignore", "-c", _EXECUTE, str(path)], check=True, cwd=tmp_path,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    return nbformat.read(path, 4)


def test_in_a_notebook(tmp_path):
    nb = _notebook(tmp_path, ["""
        import companion.ranks
        size = 3


        class Twice:
            def __call__(self, x):
                return 2 * x


        def plus(x):
            return x + size
    """, """
        from dataclasses import dataclass


        @dataclass
        class Row:
            width: int


        class Half:
            @staticmethod
            def of(x):
                return x // 2
        add = plus
        %time pass
    """, """
        if 1:
          1
         2
    """, """
        %%torchrun --nproc 2 --gloo --with size,Twice,add,dataclass,Row,Half --get y
        y = add(Twice()(Half.of(Row(2 * rank).width)))
        print(rank, y)
    """, "print(y)", """
        %%torchrun --nproc 2 --gloo --fails
        if rank == 1:
            raise ValueError("on purpose")
        dist.barrier()
    """, """
        %%torchrun --nproc 2 --gloo
        raise ValueError("not on purpose")
    """, """
        %%torchrun --nproc 1 --gloo --fails
        print("fine")
    """, "%%torchrun --nproc two\npass"])
    text = ["".join(o.get("text", "") for o in c.outputs) for c in nb.cells]
    assert text[3] == "0 3\n1 5\n" and text[4] == "[3, 5]\n"
    assert re.match(r"rank 1 of 2 failed first, after ‹.{6}› s: ValueError: on purpose\n", text[5])
    ends = [next((o for o in c.outputs if o.output_type == "error"), None) for c in nb.cells]
    assert ends[6].ename == "RanksFailed" and "not on purpose" in "\n".join(ends[6].traceback)
    assert len("\n".join(ends[6].traceback).splitlines()) < 6  # no frames of the launcher
    assert ends[7].ename == "ValueError" and "expected to fail" in ends[7].evalue
    assert ends[8].ename == "ValueError" and "two" in ends[8].evalue
    assert [e.ename for e in ends[:6] if e] == ["IndentationError"]
