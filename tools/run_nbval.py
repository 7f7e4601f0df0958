"""Run every code cell again and compare with what is stored, through nbval.

    run_nbval.py [--runner cpu|gpu] [--resume] [--repeat N] [--records FOLDER] [CHAPTER...]

Each chapter runs as a copy in an empty folder, with the built wheel of companion and
without a network. Writes a record per chapter to build/records or FOLDER; --resume leaves out
chapters whose record is already a pass of the same code with the same versions.
"""
import argparse
import shutil
import sys
import time
from pathlib import Path

import pytest

import records
from execute import CELL_SECONDS, require_gpu
from fingerprint import fingerprint
from nbval_plugin import BookPlugin, notice_dead_kernels
from notebooks import CHAPTERS, ROOT, Refused, pick, read, write_text
from offline import cut_network
from sandbox import empty_folder, sandbox


def compare(name, work, runner, network, cell_seconds, slowest=0, kept=records.LOCAL):
    """Run chapter ``name`` on ``runner``; return its record, written to folder ``kept``."""
    source = CHAPTERS / f"{name}.ipynb"
    nb = read(source)
    plugin = BookPlugin(name, _gpu_count() if runner == "gpu" else 0)
    started = time.perf_counter()
    with empty_folder(work) as folder:
        shutil.copy(source, folder)
        arguments = [str(folder / source.name), "--nbval", "--nbval-current-env", "-q", "--color=no",
                     "--nbval-sanitize-with", str(ROOT / "tools/nbval_sanitize.cfg"),
                     "--nbval-cell-timeout", str(cell_seconds), "-p", "no:cacheprovider",
                     "-p", "no:hypothesispytest",  # takes a second to import
                     "--rootdir", str(folder), "--no-header", "--no-summary",
                     "-c", _write_empty_config(folder), *([f"--durations={slowest}"] if slowest else [])]
        code = pytest.main(arguments, plugins=[plugin])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise Refused(f"chapters/{name}.ipynb: nbval stopped with {pytest.ExitCode(code).name}")
    for number, cell, why in plugin.failures:
        print(f"chapters/{name}.ipynb: code cell {number}\n{_indent(cell)}\n{_indent(why)}", file=sys.stderr)
    return records.save(name, runner, nb, plugin.counts(), time.perf_counter() - started, network, kept)


def _write_empty_config(folder):
    write_text(folder / "pytest.ini", "[pytest]\n")
    return str(folder / "pytest.ini")


def _indent(text, most=60):
    """Its lines, the middle left out where they are many: what went wrong stands at the end."""
    lines = text.strip().splitlines()
    if len(lines) > most:
        lines = [*lines[:most // 3], "...", *lines[-2 * most // 3:]]
    return "\n".join(f"    {line}" for line in lines)


def _gpu_count():
    import torch
    return torch.cuda.device_count()


def _passed_before(name, runner):
    record = records.load(name, runner)
    nb = read(CHAPTERS / f"{name}.ipynb")
    return (record is not None and record["fingerprint"] == fingerprint(nb, runner)
            and record["versions"] == records.versions() and not record["cells"]["failed"])


def main(argv):
    parser = argparse.ArgumentParser(prog="run_nbval", description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--resume", action="store_true", help="leave out chapters that passed with this code")
    parser.add_argument("--repeat", type=int, default=1, help="run each chapter this many times")
    parser.add_argument("--records", type=Path, default=records.LOCAL, help="the folder for the records")
    parser.add_argument("--cell-seconds", type=int, default=CELL_SECONDS)
    parser.add_argument("--slowest", type=int, default=0, help="show this many slowest cells")
    parser.add_argument("chapters", nargs="*")
    options = parser.parse_args(argv)
    names = pick(options.chapters)
    if options.runner == "gpu":
        require_gpu()
    network = cut_network()
    notice_dead_kernels()
    failed = 0
    with sandbox() as work:
        for name in names * options.repeat:
            if options.resume and _passed_before(name, options.runner):
                print(f"{name}: passed before with the same code and versions")
                continue
            record = compare(name, work, options.runner, network, options.cell_seconds, options.slowest,
                             ROOT / options.records)
            cells = record["cells"]
            failed += cells["failed"]
            print(f"{name} on the {options.runner}: {cells['compared']} cells compared, {cells['failed']} differ, "
                  f"{sum(cells['skipped'].values())} skipped, {record['seconds']} s", flush=True)
    if failed:
        sys.exit(f"{failed} cells differ or failed. If the new outputs are right: "
                 f"make {'execute' if options.runner == 'cpu' else 'execute-gpu'} CHAPTER=name")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"run_nbval: {refused}")
    except KeyboardInterrupt:
        sys.exit("run_nbval: interrupted; chapters that finished are recorded")
