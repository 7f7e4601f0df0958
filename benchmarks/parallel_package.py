"""What the chapters on many devices show of the stored runs, in one small file of the package.

    PYTHONPATH=. python benchmarks/parallel_package.py

Reads results/parallel_bandwidth_N.json and results/parallel_steps_N.json for every number N of
GPUs that was measured, and writes companion/data/parallel.json. Standard library only.
parallel_steps_N_again.json is a second run, on what was rented as the same machine.
"""
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PACKAGED = ROOT / "benchmarks/results", ROOT / "companion/data/parallel.json"
STEP = "name", "seconds", "tokens_per_s", "mfu", "peak_bytes", "profile", "summary", "error"


def packaged(folder=RESULTS):
    """{GPUs: {"provenance", "bandwidth": rows, "steps": rows, "steps_again": rows}}, as stored."""
    found = {}
    for path in sorted(folder.glob("parallel_*_*.json")):
        kind, ranks, again = re.fullmatch(r"parallel_(bandwidth|steps)_(\d+)(_again)?", path.stem).groups("")
        stored = json.loads(path.read_text(encoding="utf-8"))
        rows = stored["results"]["rows"]
        if kind == "bandwidth":
            rows = [{k: r[k] for k in ("collective", "bytes", "seconds", "bus_bytes_per_s",
                                       "link_bytes_per_s")} for r in rows]
        else:
            rows = [{k: r[k] for k in STEP if r.get(k) is not None} for r in rows]
        of = found.setdefault(ranks, {"provenance": {}})
        of[kind + again], of["provenance"][kind + again] = rows, stored["provenance"]
    return found


if __name__ == "__main__":
    PACKAGED.write_text(json.dumps(packaged()) + "\n", encoding="utf-8")
