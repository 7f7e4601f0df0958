"""The planner's accuracy as tables: beside measurements, public reports and other planners.

    planner_accuracy(root, table)     # the text of _generated/planner_accuracy.md

Our own predictions are made anew from benchmarks/results/memory_truth*.json by the code as it
is now, and so are those for the public reports of benchmarks/memory_cases.csv; the answers of
other planners come from benchmarks/results/memory_peers.json.
"""
import hashlib
import html
import json
import re
import sys

from notebooks import Refused
from planner_files import version

RESULTS = "benchmarks/results"
MEASURED = ("memory_truth", "memory_truth_parallel")
KINDS = {"full": "Full training, pure bf16", "autocast": "Full training, bf16 autocast",
         "fp32": "Full training, fp32", "lora": "LoRA", "inference": "Inference",
         "limited": "Under a limit that sufficed", "parallel": "Two GPUs: DDP and FSDP2"}
# tool: (address, how it was asked)
ASKED = {
    "fitcheck-llm": ("https://github.com/Anassbzdd/fitcheck",
                     "the sum of its tensor terms; autocast as its bf16, which counts fp32 "
                     "master weights; of its verdicts only “safe” counts as “fits”"),
    "accelerate": ("https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator",
                   "its training figure for Adam in fp32, by its own account for a batch of one, "
                   "also for autocast, whose states are the same; for inference the weights and "
                   "the 20 % that its guide adds"),
    "hf-vram-calc": ("",
                     "its columns for training with Adam, for LoRA and for inference; autocast as "
                     "fp32"),
    "llm-analysis": ("https://github.com/cli99/llm-analysis",
                     "training and inference with all its switches set to the row; it aims at a "
                     "lower bound"),
    "deepspeed": ("https://deepspeed.readthedocs.io/en/latest/memory.html",
                  "its documented formulas for ZeRO, which by their own account leave "
                  "activations out"),
}


def load(root, name):
    path = root / RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def percent(share, sign=""):
    return f"{100 * share:{sign}.2f} %"


def gib(nbytes):
    return f"{nbytes / 2**30:.2f}"


def stamp(root):
    """A comment that changes with whatever the text is made of."""
    digest = hashlib.sha256(version(root).encode())
    paths = [root / RESULTS / f"{name}.json" for name in (*MEASURED, "memory_peers")]
    paths += [root / "benchmarks" / name for name in (
        "memory_score.py", "memory_peers.py", "memory_cases.py", "memory_cases.csv")]
    for path in [*paths, root / "tools/planner_tables.py"]:
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return f"<!-- made from {digest.hexdigest()[:12]} -->\n"


# --- beside measurements ---------------------------------------------------------------------

def by_kind(entries, memory_score):
    """A row per kind of step: rows, held out, mean and worst error, share in the band."""
    found = []
    for group, name in KINDS.items():
        of_kind = [e for e in entries if e["row"]["group"] == group and e["error"] is not None]
        if of_kind:
            found.append(figures(name, of_kind, memory_score))
    one = [e for e in entries if e["row"]["group"] != "parallel" and e["error"] is not None]
    held = [e for e in one if e["row"]["held_out"]]
    return [*found, figures("One GPU, all", one, memory_score),
            figures("One GPU, held out", held, memory_score)]


def figures(name, entries, memory_score):
    s = memory_score.summary(entries)
    held = sum(e["row"]["held_out"] for e in entries)
    return (html.escape(name), s["rows"], held, percent(s["mean"]), percent(s["worst"]),
            f"{100 * s['band']:.0f} %")


def setup(row):
    """A row's set-up in one cell."""
    what = [row["recipe"], row["attention"], f"{row['batch']} x {row['sequence']}"]
    if row["method"] != "inference":
        what.insert(1, row["optimizer"])
    what += [f"rank {row['rank']} on {row['targets']}"] if row["method"] == "lora" else []
    what += ["checkpointing"] * row["checkpointing"]
    what += [f"{row['accumulate']} accumulated"] if row.get("accumulate", 1) > 1 else []
    what += [f"{row['new_tokens']} new tokens"] if row.get("new_tokens") else []
    what += ["DDP" if row["shard"] == 0 else "FSDP2"] if "shard" in row else []
    return html.escape(", ".join(what))


def measured_row(e):
    row, plan = e["row"], e["plan"]
    name = f"{html.escape(row['model'])}, {plan.model.layers} layers"
    held = "yes" if row["held_out"] else ""
    if e["error"] is None:
        return (name, setup(row), held, gib(plan.allocated),
                f"more than {row['limit_GiB']:g}", f"planned: {plan.verdict}")
    return (name, setup(row), held, gib(plan.allocated), gib(e["measured"]),
            percent(e["error"], "+"))


def accuracy(root, table, memory_score):
    """Blocks about our predictions beside what was measured."""
    documents = [d for d in (load(root, name) for name in MEASURED) if d]
    if not documents:
        raise Refused(f"{RESULTS}/memory_truth.json is missing")
    rows = [row for d in documents for row in d["results"]["rows"]]
    entries = memory_score.score(rows)
    ran_out = [e for e in entries if e["error"] is None]
    promised = sum(e["plan"].verdict == "fits" for e in ran_out)
    first = documents[0]
    setting = ", ".join([first["provenance"]["device"],
                         f"torch {first['provenance']['versions']['torch']}",
                         f"Transformers {first['results']['transformers']}"])
    return [
        f"{len(entries)} set-ups of models with random weights ran three steps each on one or "
        f"two GPUs ({html.escape(setting)}). The error is that of the highest peak "
        "that tensors hold. Every second row was set aside before it was measured: no term and no "
        "factor was chosen by those, though their errors were in view while causes were sought. "
        "The last column is the share of rows whose reserved bytes lie in "
        "the band that the planner prints.",
        table(("Kind", "Rows", "Held out", "Mean error", "Worst", "Reserved in band"),
              by_kind(entries, memory_score), "Predicted and measured peaks"),
        f"Under a limit, {len(ran_out)} rows ran out of memory; the planner called "
        f"{promised or 'none'} of them a fit.",
        "<details>\n<summary>All rows</summary>\n"
        + table(("Model", "Set-up", "Held out", "Predicted, GiB", "Measured, GiB", "Error"),
                [measured_row(e) for e in entries], f"All {len(entries)} rows")
        + "\n</details>"]


# --- beside public reports -------------------------------------------------------------------

def source(text):
    """A link to the repository or thread that a report's source names; plain text without one."""
    found = re.match(r"([\w.-]+/[\w.-]+)(?: (?:(issue|PR)s? (\d+))?|$)", text)
    if not found:
        return html.escape(re.sub(r"\(.*?\)|, index id \d+|\"", "", text).strip())
    repository, kind, number = found.groups()
    address, name = f"https://github.com/{repository}", repository
    if number:
        address += f"/{'issues' if kind == 'issue' else 'pull'}/{number}"
        name += f"#{number}"
    return f'<a href="{html.escape(address)}">{html.escape(name)}</a>'


def reported_setup(row):
    """What a report states, in one cell."""
    batch, length = row["micro_batch"], row["seq_len"]
    shape = f"{batch} x {length} tokens" if batch and length else \
        f"{length} tokens" if length else f"batch {batch}" if batch else ""
    gpus = f"{row['n_gpus']} GPUs" if row["n_gpus"] not in ("", "1") else ""
    what = [row["method"], row["sharding"] if row["sharding"] not in ("none", "") else "", gpus,
            shape, row["attn"] if row["attn"] != "not stated" else "",
            "checkpointing" if row["grad_ckpt"].startswith("yes") else ""]
    return html.escape(", ".join(filter(None, what)))


def case_row(case):
    row = case.row
    name = f"{source(row['source'])}<br>{html.escape(row['model'])}"
    return (name, reported_setup(row), html.escape(case.reported), html.escape(case.planned),
            case.verdict, html.escape(case.why))


def reports(table, memory_cases):
    """Blocks about public reports: the rule, the counts, and a row each."""
    found = memory_cases.judged()
    s = memory_cases.summary(found)
    promised = ", ".join(s["promised"]) or "none"
    counts = [(word, s[word], what) for word, what in (
        ("right", f"a figure within {100 * memory_cases.TOLERANCE:.0f} % or inside the planned "
                  "band, an outcome that the plan does not contradict, an exact figure to the "
                  "printed digit or as near as a figure must be"),
        ("wrong", "off, and nothing that the report leaves open explains it"),
        ("undecidable", "off, but plans of two readings that the report allows enclose what was "
                        "reported: each is planned, and the last column says how far apart"),
        ("not planned", "no decoder, no length, or a method that the planner lacks"))]
    return [
        f"{len(found)} public reports of memory, from repositories, issues and documentation, "
        "were planned with what they state, and with the usual defaults of their programs for "
        "the rest. Nothing was fitted to them, but their figures were in view when open options "
        "were filled in: the table says how they can be understood, while the rows held out "
        "above say how well a set-up that is known in full is predicted.",
        table(("Verdict", "Reports", "What it means"), counts, "Public reports"),
        f"Of the {s['figures']} figures that can be decided, the median error is "
        f"{percent(s['median'])} and the worst {percent(s['worst'])}; what lies in a planned band "
        f"counts as no error. {s['exact']} more, of caches and of single tensors, agree to the "
        f"printed digit. Planned to fit though it ran out: {len(s['promised'])}"
        + (f" ({promised}; see its row)." if s["promised"] else "."),
        "<details>\n<summary>All reports</summary>\n"
        + table(("Report", "Set-up", "Reported", "Planned", "Verdict", "Why"),
                [case_row(case) for case in found], f"All {len(found)} public reports")
        + "\n</details>"]


# --- beside other planners -------------------------------------------------------------------

def part(s):
    """Rows, mean and worst error of one kind of answer, as three cells."""
    if not s["rows"]:
        return "0", "", ""
    return s["rows"], percent(s["mean"]), percent(s["worst"])


def share(pair):
    wrong, answered = pair
    return f"{wrong} of {answered}" if answered else ""


def peer_row(name, release, s):
    found = [p["planner_mean"] * p["rows"] for p in (s["full"], s["nearly"]) if p["rows"]]
    count = s["full"]["rows"] + s["nearly"]["rows"]
    label = f"{html.escape(name)} {html.escape(release or '')}".strip()
    return (label, *part(s["full"]), *part(s["nearly"]), percent(sum(found) / count),
            share(s["promised"]), share(s["refused"]))


def unasked(name, s):
    """What a tool lacks and why rows were not asked, as an item of a list."""
    address, how = ASKED[name]
    lacks = "; ".join(f"{html.escape(w)} ({n})" for w, n in s["lacks"].items())
    no = "; ".join(f"{html.escape(w)} ({n})" for w, n in s["no"].items())
    label = f'<a href="{html.escape(address)}">{html.escape(name)}</a>' if address else name
    text = f"<li>{label}: {html.escape(how)}."
    text += f" It has no input for, in so many rows: {lacks}." if lacks else ""
    return text + (f" Not asked: {no}." if no else "") + "</li>"


def peers(root, table, memory_peers):
    """Blocks about other planners on the same rows."""
    stored = load(root, "memory_peers")
    results, day = stored["results"]["tools"], stored["provenance"]["when"][:10]
    found = memory_peers.by_gpus(results, memory_peers.truth(root / RESULTS))
    header = ("Planner", "Rows asked in full", "Mean error", "Worst", "Rows asked nearly",
              "Mean error", "Worst", "This planner's mean on all of these",
              "Ran out, called a fit", "Ran, called no fit")
    blocks = []
    for gpus, of_tools in found.items():
        answered = {n: s for n, s in of_tools.items() if s["full"]["rows"] + s["nearly"]["rows"]}
        silent = [n for n in of_tools if n not in answered]
        if len(answered) > 1:
            rows = [peer_row("this planner" if n == "companion" else n,
                             results.get(n, {}).get("version"), s) for n, s in answered.items()]
            blocks.append(table(header, rows, f"Planners on the same rows, {gpus}"))
            if silent:
                blocks.append(f"On {gpus}, {', '.join(silent)} cannot be asked.")
    items = "\n".join(unasked(n, s) for n, s in found["one GPU"].items() if n in ASKED)
    return [
        f"The same rows were put to public planners on {day}, each through its own interface "
        "and at the setting nearest to the row. A row is asked in full if the planner has an "
        "input for all that the row states, and nearly if it lacks one.",
        *blocks, f"<ul>\n{items}\n</ul>"]


def planner_accuracy(root, table):
    """The text of the page's part. ``table(header, rows, caption)`` writes a table.

    Text made of the same files is not made again.
    """
    now, old = stamp(root), root / "_generated/planner_accuracy.md"
    if old.is_file() and (text := old.read_text(encoding="utf-8")).startswith(now):
        return text
    for folder in root, root / "benchmarks":
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import memory_cases
    import memory_peers
    import memory_score
    blocks = ["### Beside measurements", *accuracy(root, table, memory_score),
              "### Beside public reports", *reports(table, memory_cases)]
    if load(root, "memory_peers"):
        blocks += ["### Beside other planners", *peers(root, table, memory_peers)]
    return now + "\n\n".join(blocks) + "\n"
