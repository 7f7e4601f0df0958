"""The planner beside public ones, on the rows of the truth set that each can express.

    PYTHONPATH=. python benchmarks/memory_peers.py --install    # once: pip fetches the tools
    PYTHONPATH=. python benchmarks/memory_peers.py

The first makes a virtual environment for each tool in a folder of the system's temporary one
(--venvs: another), never in the book's. The second asks each tool about every row
(memory_peers_ask.py, which says how) and stores its answers and version in
results/memory_peers.json. Two kinds of answers are kept apart: a row is asked in full if the
tool has an input for all that the row states, nearly if it lacks one. Errors are of the peak
that tensors hold; rows with a limit are judged by what the tool says of that limit.
DeepSpeed's formulas are computed from its documentation and need no environment.
"""
import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path

from memory_score import RESULTS, peak_of, score

NAME = "memory_peers"
ASK = Path(__file__).with_name("memory_peers_ask.py")
# tool: (environment, what pip installs there)
PACKAGES = {
    "fitcheck-llm": ("fitcheck-llm", ["fitcheck-llm==0.3.1"]),
    "accelerate": ("accelerate", ["hf-vram-calc==1.0.9", "accelerate==1.15.0"]),
    "hf-vram-calc": ("accelerate", ["hf-vram-calc==1.0.9", "accelerate==1.15.0"]),
    "llm-analysis": ("llm-analysis", ["llm-analysis==0.2.2"]),
}
TOOLS = (*PACKAGES, "deepspeed")


def truth(folder=RESULTS):
    """All measured rows, of one GPU and of two."""
    paths = [folder / f"{name}.json" for name in ("memory_truth", "memory_truth_parallel")]
    return [row for path in paths if path.exists()
            for row in json.loads(path.read_text(encoding="utf-8"))["results"]["rows"]]


def on_one_gpu(row):
    return row.get("gpus", 1) == 1


def question(row):
    """What a tool may know of a row: no measurement, and the base model's parameters."""
    asked = {k: row[k] for k in row if k not in (
        "outcome", "message", "peak_allocated", "peak_reserved", "peak_device", "fullest",
        "moments", "seconds", "definition", "held_out")}
    load = next((m for m in row["moments"] if m["moment"] == "load"), None)
    if load:  # a row that ran out while loading has none
        adapters = load["trainable"] if row["method"] == "lora" else 0
        asked["parameters"] = load["parameters"] - adapters
    return asked


def questions(rows):
    """Of all rows; where loading itself ran out, another row of that model knows its size."""
    asked = [question(r) for r in rows]
    sizes = {json.dumps(q["config"], sort_keys=True): q["parameters"]
             for q in asked if "parameters" in q}
    for q in asked:
        q.setdefault("parameters", sizes.get(json.dumps(q["config"], sort_keys=True)))
    return asked


def install(folder):
    for place, packages in dict(PACKAGES.values()).items():
        venv.create(folder / place, with_pip=True, clear=True)
        subprocess.run([folder / place / "bin/python", "-m", "pip", "install", "--quiet",
                        *packages], check=True)


def ask(tool, asked, folder):
    """{"version": ..., "answers": {id: answer}} of one tool, from its own environment."""
    python = folder / PACKAGES[tool][0] / "bin/python" if tool in PACKAGES else sys.executable
    done = subprocess.run([python, ASK, tool], input=json.dumps(asked), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{tool}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


# --- what comes of it ------------------------------------------------------------------------

def ours(entries):
    """The planner's own answers, in the form of a tool's."""
    return {e["row"]["id"]: {"bytes": e["predicted"], "lacks": [], "says": says(e)}
            for e in entries}


def says(entry):
    """The verdict in a tool's words."""
    verdict = entry["plan"].verdict
    return "unsure" if verdict == "tight" else verdict


def errors(answers, rows):
    """Absolute relative errors of the answers, by id, where a peak was measured."""
    return {r["id"]: abs(answers[r["id"]]["bytes"] / peak_of(r) - 1) for r in rows
            if r["outcome"] == "ok" and "bytes" in answers.get(r["id"], {})}


def statistics(answers, rows, planner):
    """Mean and worst error over ``rows``, and the planner's mean over the same ones."""
    found = errors(answers, rows)
    if not found:
        return {"rows": 0}
    mine = errors(planner, [r for r in rows if r["id"] in found])
    held = [found[r["id"]] for r in rows if r["id"] in found and r["held_out"]]
    return {"rows": len(found), "mean": sum(found.values()) / len(found),
            "worst": max(found.values()), "held_out": len(held),
            "mean_held_out": sum(held) / len(held) if held else None,
            "planner_mean": sum(mine.values()) / len(mine), "planner_worst": max(mine.values())}


def verdicts(answers, rows):
    """What was said of rows with a limit: [promised, answered] of those that ran out, and
    [refused, answered] of those that ran."""
    found = {"out of memory": [0, 0], "ok": [0, 0]}
    wrong = {"out of memory": "fits", "ok": "does not fit"}
    for r in rows:
        said = answers.get(r["id"], {}).get("says")
        if r.get("limit_GiB") and said:
            found[r["outcome"]][0] += said == wrong[r["outcome"]]
            found[r["outcome"]][1] += 1
    return {"promised": found["out of memory"], "refused": found["ok"]}


def summary(answers, rows, planner):
    """All figures of one tool; ``planner`` holds our own answers."""
    answers = {r["id"]: answers[r["id"]] for r in rows if r["id"] in answers}
    in_full = {i for i, a in answers.items() if "bytes" in a and not a["lacks"]}
    nearly = {i for i, a in answers.items() if "bytes" in a and a["lacks"]}
    return {"full": statistics(answers, [r for r in rows if r["id"] in in_full], planner),
            "nearly": statistics(answers, [r for r in rows if r["id"] in nearly], planner),
            "lacks": dict(Counter(w for i in sorted(nearly) for w in answers[i]["lacks"])),
            "no": dict(Counter(a["no"] for a in answers.values() if "no" in a)),
            **verdicts(answers, rows)}


def summaries(tools, rows, entries):
    """{tool: summary} of some of the rows, the planner first; entries: of memory_score.score."""
    planner = ours(entries)
    return {"companion": summary(planner, rows, planner),
            **{tool: summary(t["answers"], rows, planner) for tool, t in tools.items()}}


def by_gpus(tools, rows):
    """{"one GPU": summaries, "two GPUs": summaries}"""
    entries = score(rows)
    return {name: summaries(tools, [r for r in rows if on_one_gpu(r) == one], entries)
            for name, one in (("one GPU", True), ("two GPUs", False))}


def line(name, version, s):
    def part(p):
        if not p["rows"]:
            return f"{0:>4} rows{'':>31}"
        return (f"{p['rows']:>4} rows {100 * p['mean']:7.2f} %, worst {100 * p['worst']:7.2f} %, "
                f"ours {100 * p['planner_mean']:.2f} %")
    return (f"{name:<14}{version or '':<8}full:{part(s['full'])} nearly:{part(s['nearly'])} "
            f"promised {s['promised'][0]} of {s['promised'][1]}, "
            f"refused {s['refused'][0]} of {s['refused'][1]}, not asked {sum(s['no'].values())}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venvs", type=Path, help="a folder for the environments",
                        default=Path(tempfile.gettempdir()) / "memory-peers")
    parser.add_argument("--install", action="store_true", help="make the environments, and stop")
    parser.add_argument("--only", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    o = parser.parse_args()
    if o.install:
        install(o.venvs)
        return
    rows = truth()
    asked = questions(rows)
    tools = {tool: ask(tool, asked, o.venvs) for tool in o.only}
    found = by_gpus(tools, rows)
    for gpus, of_tools in found.items():
        print(gpus)
        for name, s in of_tools.items():
            print(line(name, tools.get(name, {}).get("version"), s))
            for key in "lacks", "no":
                for reason, n in s[key].items():
                    print(f"    {key} {n:>3}: {reason}")
    if set(o.only) == set(TOOLS):
        from provenance import save
        asking = hashlib.sha256(ASK.read_bytes()).hexdigest()[:16]
        save(NAME, __file__, {"asked_by": ASK.name, "asked_by_sha256": asking, "tools": tools,
                              "summaries": found}, o.out)


if __name__ == "__main__":
    main()
