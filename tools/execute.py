"""Execute chapters and store their outputs, deterministically.

    execute.py [--gpu] [--cell-seconds N] [CHAPTER...]

On a CPU the stored outputs of GPU cells are kept, and not called fresh. With --gpu
all cells run, and only the GPU cells' outputs are replaced. A chapter is written
after all its cells ran: one that fails, hangs or is interrupted stays as it was.
"""
import argparse
import copy
import subprocess
import sys
import time

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from fingerprint import fingerprint
from notebooks import CHAPTERS, GPU_TAGS, Refused, code_cells, is_gpu, pick, write
from offline import cut_network
from sandbox import empty_folder, sandbox
from sync import synced

CELL_SECONDS = 120


class _Client(NotebookClient):
    """Shows progress, remembers where it was when a cell fails, and tells Ctrl-C from a dead kernel."""

    where = 0
    interrupted = False

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        self.where = cell_index
        if cell.cell_type == "code" and sys.stderr.isatty():
            print(f"\r  cell {cell_index + 1} of {len(self.nb.cells)} ", end="", file=sys.stderr)
        try:
            return await super().async_execute_cell(cell, cell_index, **kwargs)
        except DeadKernelError:
            self.interrupted = self.km is None  # on Ctrl-C nbclient has already put the kernel away
            raise

    async def _async_cleanup_kernel(self):
        if self.km is not None:
            await super()._async_cleanup_kernel()


def run(nb, name, folder, gpu=False, seconds=CELL_SECONDS):
    """Execute all cells of ``nb`` that this runner runs, in ``folder``, in place."""
    skip = "needs-a-machine-that-does-not-exist" if gpu else GPU_TAGS[1]
    client = _Client(nb, timeout=seconds, kernel_name="python3", record_timing=False,
                     store_widget_state=False, coalesce_streams=True, skip_cells_with_tag=skip,
                     resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(stderr=subprocess.DEVNULL)  # ipykernel greets there; outputs come by message
    except CellTimeoutError:
        raise Refused(f"{_where(name, nb, client)} ran longer than {seconds} s; nothing was stored") from None
    except DeadKernelError:
        if client.interrupted:
            raise KeyboardInterrupt from None
        raise Refused(f"{_where(name, nb, client)} killed its kernel (out of memory? a crash in C?); "
                      "nothing was stored") from None
    except CellExecutionError as error:
        raise Refused(f"{_where(name, nb, client)} raised {error.ename}: {error.evalue}\n"
                      f"{error.traceback}\nNothing was stored") from None


def _where(name, nb, client):
    first = nb.cells[client.where].source.strip().split("\n")[0]
    number = sum(c.cell_type == "code" for c in nb.cells[:client.where])
    return f"chapters/{name}.md: code cell {number} ({first!r})"


def _renumber(nb):
    """Count executed cells 1, 2, 3...: the same numbers whoever ran last."""
    for number, cell in enumerate(code_cells(nb), 1):
        if cell.execution_count is not None:
            cell.execution_count = number
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = number


def execute(name, work, gpu, seconds=CELL_SECONDS):
    """Run chapter ``name`` and store its outputs."""
    started = time.perf_counter()
    nb = synced(name)
    fresh = copy.deepcopy(nb)
    with empty_folder(work) as folder:
        run(fresh, name, folder, gpu, seconds)
    for cell, done in zip(code_cells(nb), code_cells(fresh)):
        if is_gpu(cell) == gpu or gpu and cell.execution_count is None:
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    _renumber(nb)
    runner = "gpu" if gpu else "cpu"
    nb.metadata["companion"][runner] = fingerprint(nb, runner)
    write(nb, CHAPTERS / f"{name}.ipynb")
    print(f"executed chapters/{name}.ipynb on the {runner} in {time.perf_counter() - started:.1f} s")


def main(argv):
    parser = argparse.ArgumentParser(prog="execute", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--cell-seconds", type=int, default=CELL_SECONDS)
    parser.add_argument("chapters", nargs="*")
    options = parser.parse_args(argv)
    names = pick(options.chapters)
    if options.gpu:
        require_gpu()
    cut_network()
    with sandbox() as work:
        for name in names:
            execute(name, work, options.gpu, options.cell_seconds)


def require_gpu():
    import torch
    if not torch.cuda.is_available():
        raise Refused("this machine has no CUDA GPU that torch can use; `make gpu-bundle` packs what a GPU runner needs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"execute: {refused}")
    except KeyboardInterrupt:
        sys.exit("execute: interrupted; the chapter being run is unchanged")
