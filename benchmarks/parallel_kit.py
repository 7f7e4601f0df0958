"""What parallel_bandwidth.py and parallel_steps.py share: ranks, times, a ledger that survives.

Every configuration is tried by itself. What it gave, or its error, is written before the next
one begins. Should a rank die or hang in one, ``torchrun --max-restarts`` goes on with the next.
"""
import argparse
import gc
import json
import os
import statistics
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from companion import train
from companion.hardware import gpu
from provenance import RESULTS, save

LONGEST = timedelta(seconds=45)  # of a collective: then the rank is taken for hung


class Ranks:
    """The ranks of this run: ``rank`` of ``size``, on ``device``; ``gpu``: its row, or None."""

    def __init__(self, device):
        self.device = train.pick(device)
        train.join(self.device, timeout=LONGEST)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.cuda = self.device.type == "cuda"
        self.talk = dist.new_group(backend="gloo", timeout=LONGEST)  # of objects, never of data
        try:
            self.gpu = gpu(torch.cuda.get_device_name()) if self.cuda else None
        except ValueError:
            self.gpu = None
        self._groups, self._meshes = {}, {}

    def all(self, value):
        """``value`` of each rank: a list."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def group(self, ranks):
        """A process group of these ranks, made once. Every rank must ask for it."""
        if ranks not in self._groups:
            everyone = len(ranks) == self.size
            self._groups[ranks] = dist.group.WORLD if everyone else dist.new_group(
                list(ranks), timeout=LONGEST)
        return self._groups[ranks]

    def mesh(self, **shape):
        """The ranks as a grid, such as ``mesh(data=2, pipe=2)``; made once."""
        key = tuple(shape.items())
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, tuple(shape.values()),
                                                 mesh_dim_names=tuple(shape))
        return self._meshes[key]

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, function, repeats, warm_ups=2):
        """Times of ``function()``, that of the slowest rank each: (median, least, most)."""
        times = []
        for i in range(warm_ups + repeats):
            self.synchronize()
            dist.barrier(group=self.talk)
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append(time.perf_counter() - start)
        slowest = [max(t) for t in zip(*self.all(times[warm_ups:]))]
        return statistics.median(slowest), min(slowest), max(slowest)

    def clear(self):
        """Forget what the last configuration held, and its peak."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self, reserved=False):
        """Most bytes that the allocator had given out since ``clear``: one a rank, or None.

        reserved: that it had taken from the GPU, which is more.
        """
        if not self.cuda:
            return None
        return self.all(torch.cuda.max_memory_reserved() if reserved
                        else torch.cuda.max_memory_allocated())


class Ledger:
    """Results by configuration, in ``<folder>/<name>.json`` after each one."""

    def __init__(self, ranks, name, script, folder, facts, budget):
        self.ranks, self.name, self.script, self.folder = ranks, name, script, Path(folder)
        self.end = time.monotonic() + budget
        self.results = {**facts, "ranks": ranks.size, "rows": []}
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            path = self.folder / f"{name}.json"
            if path.exists():
                self.results = json.loads(path.read_text(encoding="utf-8"))["results"]
        for row in self.results["rows"]:
            if row.pop("begun", False):
                row["error"] = "a rank died or hung"

    def row(self, name):
        """What was recorded for ``name``. Raises ValueError if it has failed or not run."""
        for row in self.results["rows"]:
            if row["name"] == name and "error" not in row:
                return row
        raise ValueError(f"{name} gave no result")

    def run(self, name, measure):
        """Record ``measure()``, a dict, as the row ``name``; its error if it raises."""
        rows = self.results["rows"]
        if any(row["name"] == name for row in rows):
            return  # from before a restart
        rows.append({"name": name, "begun": True})
        self._write()
        start = time.monotonic()
        found = {"error": "not run: the budget of time was spent"}
        if all(self.ranks.all(start < self.end)):
            self.ranks.clear()
            found = self._tried(measure)
        rows[-1] = {"name": name, **found, "took": round(time.monotonic() - start, 2)}
        self._write()
        if self.ranks.rank == 0:
            print(f"{name}: {found.get('error') or found.get('summary', 'done')} "
                  f"({rows[-1]['took']} s)", flush=True)

    def _tried(self, measure):
        found, error = None, None
        try:
            found = measure()
        except Exception as caught:
            at = traceback.extract_tb(caught.__traceback__)[-1]
            text = str(caught).strip() or "no message"
            error = f"{type(caught).__name__}: {text.splitlines()[0]} ({at.name}:{at.lineno})"
        errors = {r: e for r, e in enumerate(self.ranks.all(error)) if e}
        if not errors:
            return found
        rank = min(errors)
        return {"error": f"rank {rank}: {errors[rank]}"}

    def _write(self):
        if self.ranks.rank == 0:
            save(self.name, self.script, self.results, self.folder)


def arguments(purpose, words=None):
    """The options of both scripts. words: by default the command line's."""
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--only", help="names of configurations, comma-separated")
    parser.add_argument("--budget", type=float, default=600,
                        help="seconds after which no configuration begins")
    return parser.parse_args(words)


def on_ranks(main, purpose):
    """Run ``main(options, ranks)`` as a script under torchrun."""
    o = arguments(purpose)
    main(o, Ranks(o.device))
    dist.destroy_process_group()


def setting(ranks):
    """What the machine is: for the ledger."""
    if not ranks.cuda:
        return {"backend": "gloo", "device": "CPU"}
    names = ("NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO")
    nccl = {name: os.environ[name] for name in names if name in os.environ}
    return {"backend": "nccl", "device": torch.cuda.get_device_name(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "environment": nccl}
