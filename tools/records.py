"""What was run where: one JSON record per chapter and runner, and what it is worth today.

A run writes to build/records. `make record` moves those into chapters/records, which
is committed; the status page and `make status` read both and take the newer one.
"""
import json
import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata

from fingerprint import RUNNERS, fingerprint, stored
from notebooks import CHAPTERS, ROOT, Refused, chapter_names, code_cells, is_gpu, read, write_json

COMMITTED, LOCAL = CHAPTERS / "records", ROOT / "build/records"
_PACKAGES = ("torch", "torchvision", "triton", "numpy", "matplotlib", "nbval", "ipykernel")


def versions():
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def device(runner):
    """The processor or GPU of this machine, by the name it gives itself."""
    if runner == "gpu":
        import torch
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]
    try:
        text = open("/proc/cpuinfo", encoding="utf-8").read()
        model = next(line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def path(name, runner, folder=COMMITTED):
    return folder / f"{name}.{runner}.json"


def load(name, runner):
    """The newest record of the chapter on that runner, or None."""
    found = []
    for folder in (COMMITTED, LOCAL):
        file = path(name, runner, folder)
        if file.is_file():
            try:
                record = json.loads(file.read_text(encoding="utf-8"))
                found.append((record["when"], record))
            except (ValueError, KeyError, TypeError):
                raise Refused(f"{file.relative_to(ROOT)} is not a record: delete it and run the chapter again") from None
    return max(found, key=lambda pair: pair[0])[1] if found else None


def save(name, runner, nb, counts, seconds, network, folder=LOCAL):
    """Write this run's record to ``folder`` and return it."""
    record = {
        "chapter": name, "runner": runner, "fingerprint": fingerprint(nb, runner),
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device(runner), "versions": versions(), "cells": counts,
        "seconds": round(seconds, 1), "network": network,
    }
    write_json(path(name, runner, folder), record)
    return record


def state(name, runner, nb=None):
    """(word, reason): is what the page shows for this runner checked, and still its code?

    fresh: stored outputs and the last passing run are of the code on the page.
    """
    nb = nb or read(CHAPTERS / f"{name}.ipynb")
    now, record = fingerprint(nb, runner), load(name, runner)
    cells = [c for c in code_cells(nb) if is_gpu(c) == (runner == "gpu")]
    if runner == "gpu" and any(c.execution_count is None for c in cells):
        return "stale", "some GPU cells have never run"
    if stored(nb, runner) != now and (cells or runner == "cpu"):
        return "stale", "the code changed since these outputs were stored"
    if record is None:
        return "never run", f"no run on a {runner.upper()} is recorded"
    if record["fingerprint"] != now:
        return "stale", f"the code changed since the run of {record['when'][:10]}"
    if record["cells"]["failed"]:
        return "failed", f"{record['cells']['failed']} cells differed or failed"
    return "fresh", ""


def table():
    """Rows (chapter, runner, state, reason, record) of all chapters, in the order of names."""
    rows = []
    for name in chapter_names():
        nb = read(CHAPTERS / f"{name}.ipynb")
        for runner in RUNNERS:
            rows.append((name, runner, *state(name, runner, nb), load(name, runner)))
    return rows


def status():
    """Print the table; return how many rows are not fresh."""
    rows = table()
    print(f"{'chapter':26}{'runner':8}{'state':11}{'last run':12}{'cells':>6} {'skipped':>8} {'time':>7}  device")
    for name, runner, word, reason, record in rows:
        seen = ""
        if record:
            cells = record["cells"]
            seen = (f"{record['when'][:10]:12}{cells['compared']:>6} {sum(cells['skipped'].values()):>8} "
                    f"{record['seconds']:>6.1f}s  {record['device']}")
        print(f"{name:26}{runner:8}{word:11}{seen}" + (f"  ({reason})" if reason else ""))
    return sum(row[2] != "fresh" for row in rows)


def promote():
    """Move the local records that are of the code on the page into chapters/records."""
    for name in chapter_names():
        nb = read(CHAPTERS / f"{name}.ipynb")
        for runner in RUNNERS:
            local = path(name, runner, LOCAL)
            if local.is_file():
                record = json.loads(local.read_text(encoding="utf-8"))
                if record["fingerprint"] == fingerprint(nb, runner):
                    write_json(path(name, runner), record)
                    print(f"recorded {name} on the {runner}")
                local.unlink()


def main(argv):
    if argv == ["promote"]:
        return promote()
    if argv == ["status"]:
        return sys.exit(bool(status()))
    sys.exit("usage: records.py status|promote")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"records: {refused}")
