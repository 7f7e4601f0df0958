"""The front page's table: what each technique costs and saves, as far as a claim checks it.

    thesis_markdown()    # the table, for _generated/thesis.md, which intro.md includes

A cell holds a phrase and the ids of the claims behind it, each of which must be checked.
A technique enters the table with the chapter that measures it; a cell without a claim
shows a dash, not what everybody knows.
"""
import csv
import html
import sys

from notebooks import ROOT, Refused

COLUMNS = ("Memory", "Compute", "Communication", "Accuracy")
UNITS = ("bytes held", "FLOPs", "bytes sent", "quality")
CLAIMS_PAGE = "_generated/claims.html"  # as seen from the front page
NOT_YET = "–"

# technique -> column -> (phrase, claim ids)
TABLE = {
    "Mixed precision, against fp32":
        {"Memory": ("states: 16 bytes per parameter, nothing saved", ["C023", "C024"])},
    "Autocast over fp32 weights":
        {"Memory": ("2 bytes per parameter more, until backward", ["C578"])},
    "All in bf16, AdamW":
        {"Memory": ("states: 8 bytes per parameter", ["C397", "C577"])},
    "8-bit Adam":
        {"Memory": ("states: less, yet a 7B does not fit on 24 GB", ["C004"]),
         "Accuracy": ("on the small decoder within 0.005 nats a byte of fp32 moments", ["C744"])},
    "Adafactor":
        {"Memory": ("states: rows plus columns of each matrix, not rows times columns",
                    ["C404"]),
         "Accuracy": ("on the small decoder less than 0.03 nats a byte above AdamW, at equal steps",
                      ["C746"])},
    "Muon":
        {"Memory": ("states: 4 bytes per parameter of its matrices", ["C408"]),
         "Compute": ("its products are 0.4 % of a 4M-token step of a 7B, 25.8 % at 64k tokens",
                     ["C410"]),
         "Communication": ("sharded through owners: 8.0 % of FSDP's on 8 GPUs, for a 7B", ["C736"]),
         "Accuracy": ("on the small decoder more than 0.05 nats a byte below AdamW, at equal steps",
                      ["C746"])},
    "LoRA":
        {"Memory": ("states of a 13B: 26 to 27 GB, not 208; activations stay",
                    ["C144", "C747"]),
         "Compute": ("two thirds of the FLOPs of full training", ["C416"])},
    "QLoRA":
        {"Memory": ("states of a 7B: 3.77 GB, not 112; scales come on top",
                    ["C097", "C095", "C025"])},
    "Smaller batch, shorter sequence":
        {"Memory": ("activations only, no state", ["C003", "C022", "C028"])},
    "Recomputation":
        {"Memory": ("activations: the blocks' inputs and one block, 0.27 and 0.31 GB, not 9.93",
                    ["C096"]),
         "Compute": ("a step of a Llama block 1.262 to 1.333 times, by policy", ["C050"]),
         "Accuracy": ("the same gradients, dropout included", ["C048", "C193"])},
    "Accumulation, k micro-batches":
        {"Memory": ("activations: one micro-batch's", ["C603"]),
         "Compute": ("the same matmul FLOPs", ["C618"]),
         "Communication": ("once a window with no_sync, else with every micro-batch", ["C619"]),
         "Accuracy": ("the same gradients if sums are divided by the window's count",
                      ["C605"])},
    "Packing texts with a document mask":
        {"Compute": ("rows 99 % full, longest first; padded random batches of 8 waste 64 %",
                     ["C551", "C550"]),
         "Accuracy": ("the same logits", ["C552"])},
    "Offloading what is saved":
        {"Memory": ("activations: none stays on the device", ["C917"]),
         "Communication": ("to hide it: 130 GB/s for a 7B layer at 8,192 tokens; for its input 6.9",
                           ["C557"])},
    "Fusing elementwise operations":
        {"Compute": ("the same FLOPs; time falls as the bytes do, three operations from six "
                     "passes over memory to two", ["C275", "C016"])},
    "Fused attention":
        {"Memory": ("activations: in proportion to the sequence, no square", ["C028"])},
    "Fused optimizer step":
        {"Memory": ("no temporaries, else as large as all parameters", ["C515"])},
    "Gradients set to None":
        {"Memory": ("peak: lower by the smaller of gradients and activations", ["C512"])},
    "Data parallelism":
        {"Memory": ("states: all of them on each rank", ["C062"]),
         "Communication": ("2(n - 1)/n times the gradients a step", ["C327"]),
         "Accuracy": ("one process's result, if gradients are averaged", ["C315"])},
    "Sharded states, ZeRO-1":
        {"Memory": ("states of a 7B on 8 GPUs: 38.5 GB on each, not 112", ["C065", "C098"]),
         "Communication": ("as much as data parallelism", ["C328"]),
         "Accuracy": ("one process's result", ["C798"])},
    "Full sharding, ZeRO-3 and FSDP2":
        {"Memory": ("states of a 7B on 8 GPUs: 14 GB on each, not 112; activations stay",
                    ["C065", "C098", "C333"]),
         "Communication": ("1.5 times data parallelism's", ["C064"]),
         "Accuracy": ("one process's result", ["C795"])},
    "Averaging every 500 steps":
        {"Communication": ("250 times less, with float32 differences", ["C571"]),
         "Accuracy": ("no longer one process's result", ["C804"])},
    "Tensor parallelism over t ranks":
        {"Memory": ("activations of a GPT block: 10 + 24/t of 34 bytes", ["C342"]),
         "Communication": ("two all-reduces of the activations forward and two backward a layer",
                           ["C339"]),
         "Accuracy": ("one process's result", ["C340"])},
    "Tokens cut too, sequence parallelism":
        {"Memory": ("activations of a GPT block: 34/t if inputs are gathered again, else 4 + 30/t",
                    ["C817", "C818"]),
         "Communication": ("tensor parallelism's bytes; 1.25 times if gathered again",
                           ["C343", "C819"]),
         "Accuracy": ("one process's result", ["C340"])},
    "Pipeline of p stages, GPipe":
        {"Memory": ("activations of all m micro-batches on each rank", ["C336", "C838"]),
         "Compute": ("idle (p - 1)/(m + p - 1) of the time", ["C057"]),
         "Communication": ("one message a micro-batch, boundary and direction", ["C839", "C872"]),
         "Accuracy": ("one process's result", ["C835"])},
    "1F1B":
        {"Memory": ("activations of min(m, p - r) micro-batches on rank r, not of m", ["C336"]),
         "Compute": ("exactly GPipe's time, if messages take none", ["C336"]),
         "Accuracy": ("one process's result", ["C835"])},
    "Interleaving, v stages a rank":
        {"Memory": ("activations of p(1 + (p - 1)/(pv)) micro-batches on the first rank", ["C831"]),
         "Compute": ("the bubble divided by v", ["C831"]),
         "Communication": ("2m(pv - 1) messages on all ranks together", ["C831"]),
         "Accuracy": ("one process's result", ["C835"])},
    "Zero bubble, ZB-H1":
        {"Memory": ("activations of p micro-batches at most", ["C832"]),
         "Compute": ("a bubble of (p - 1)(F + I - W); PyTorch's starts autograd once a weight",
                     ["C832", "C895"]),
         "Accuracy": ("one process's result", ["C835"])},
    "Ring attention":
        {"Memory": ("its own q, k, v and output on each rank, nothing of the others", ["C852"]),
         "Compute": ("equal work on every rank with zigzag chunks; contiguous ones use 57 % of 4",
                     ["C418", "C419"]),
         "Communication": ("2(n - 1) B K c d numbers forward, 2(2n - 1) B K c d backward", ["C851"]),
         "Accuracy": ("one process's result", ["C319", "C854"])},
    "Ulysses":
        {"Communication": ("the ring's over n K / (H + K), n up to K: less for Llama-3-8B on 8 ranks, more on 4",
                           ["C420", "C853"]),
         "Accuracy": ("one process's result", ["C854"])},
    "Expert parallelism":
        {"Memory": ("the router and E/n experts on each rank", ["C857"]),
         "Communication": ("D numbers for each slot on another rank, and as many back", ["C856"]),
         "Accuracy": ("one process's result; with a capacity, tokens are dropped", ["C320", "C428"])},
}


def claim_ids():
    """All claim ids that the table stands on."""
    return sorted({id for row in TABLE.values() for _, ids in row.values() for id in ids})


def read_claims():
    with open(ROOT / "companion/claims.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def claim_link(id, claims):
    """``<a>`` to the claim's row; the statement shows on hovering.

    Raises Refused for an id that claims.csv lacks or does not call checked.
    """
    if id not in claims:
        raise Refused(f"tools/thesis.py: {id} is not in companion/claims.csv")
    if claims[id]["status"] != "checked":
        raise Refused(f"tools/thesis.py: {id} is {claims[id]['status']}, not checked")
    title = html.escape(" ".join(claims[id]["statement"].split())).replace("|", "&#124;")
    return f'<a href="{CLAIMS_PAGE}#{id}" title="{title}">{id}</a>'


def cell(row, column, claims):
    if column not in row:
        return NOT_YET
    phrase, ids = row[column]
    return f"{phrase} ({', '.join(claim_link(id, claims) for id in ids)})"


def thesis_markdown(claims=None):
    """The table as Markdown. claims: rows of claims.csv as dictionaries, by default all."""
    claims = {row["id"]: row for row in (read_claims() if claims is None else claims)}
    head = ["Technique", *(f"{name}<br>{unit}" for name, unit in zip(COLUMNS, UNITS))]
    lines = [head, ["---"] * len(head)]
    lines += [[name, *(cell(row, c, claims) for c in COLUMNS)] for name, row in TABLE.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    try:
        print(thesis_markdown(), end="")
    except Refused as refused:
        sys.exit(f"thesis: {refused}")
