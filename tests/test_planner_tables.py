"""The planner beside other planners: what they are asked, what their answers are worth."""
import json
import re
import sys

import pytest

import planner_tables
from notebooks import ROOT, Refused

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory_cases  # noqa: E402
import memory_peers  # noqa: E402
import memory_peers_ask  # noqa: E402

ROWS = memory_peers.truth()
STORED = json.loads((ROOT / "benchmarks/results/memory_peers.json").read_text())["results"]


def toy(id, peak, outcome="ok", limit=None, held_out=False):
    return {"id": id, "outcome": outcome, "limit_GiB": limit, "held_out": held_out,
            "moments": [{"moment": "load", "peak": 10 * peak}, {"moment": "step", "peak": peak}]}


def table(header, rows, caption):
    return "\n".join(" | ".join(map(str, row)) for row in (header, *rows)) + f"\n{caption}"


# --- questions and answers -----------------------------------------------------------------------

def test_a_question_holds_no_measurement():
    secret = set(ROWS[0]) - set(memory_peers.question(ROWS[0]))
    assert {"outcome", "moments", "peak_allocated", "peak_device", "fullest"} <= secret
    for row, q in zip(ROWS, memory_peers.questions(ROWS), strict=True):
        assert q["id"] == row["id"] and q["parameters"] > 1e6
        assert not any(key.startswith("peak") for key in q)


def test_the_parameters_of_a_question_are_those_of_the_base_model():
    from companion.planner_models import from_config
    for q in memory_peers.questions(ROWS):
        assert q["parameters"] == from_config(q["config"]).parameters, q["id"]


def test_every_tool_answered_or_said_why_not():
    assert set(STORED["tools"]) == set(memory_peers.TOOLS) == set(memory_peers_ask.TOOLS)
    for name, tool in STORED["tools"].items():
        assert bool(tool["version"]) == (name != "deepspeed")
        assert {r["id"] for r in ROWS} == set(tool["answers"])
        for answer in tool["answers"].values():
            assert answer.get("no") or answer["bytes"] > 1e7


def test_stored_figures_follow_from_the_stored_answers():
    now = memory_peers.by_gpus(STORED["tools"], ROWS)
    for gpus, tools in STORED["summaries"].items():
        for name in STORED["tools"]:
            for kind in "full", "nearly":
                for figure in "rows", "mean", "worst":
                    old, new = (s[name][kind].get(figure) for s in (tools, now[gpus]))
                    assert old == pytest.approx(new) or old is new is None
            assert tools[name]["promised"] == now[gpus][name]["promised"]


def test_deepspeeds_formulas_agree_with_the_example_of_its_documentation():
    """2851 million parameters, 32 million in the largest layer, 8 GPUs: 6.09 GiB."""
    q = {"id": "a", "method": "full", "optimizer": "adamw", "recipe": "fsdp", "gpus": 8, "shard": 3,
         "parameters": 2851 * 10**6, "config": {"vocab_size": 32000, "hidden_size": 1000}}
    answer = memory_peers_ask.ask("deepspeed", [q])["a"]
    assert round(answer["bytes"] / 2**30, 2) == 6.09 and answer["lacks"]
    one = memory_peers_ask.ask("deepspeed", [{**q, "gpus": 1, "recipe": "autocast"}])["a"]
    assert one["bytes"] == 20 * q["parameters"]
    assert "no" in memory_peers_ask.ask("deepspeed", [{**q, "recipe": "bf16"}])["a"]


# --- statistics ----------------------------------------------------------------------------------

def test_errors_in_full_and_nearly_are_kept_apart():
    rows = [toy("a", 100), toy("b", 100, held_out=True), toy("c", 100), toy("d", 100)]
    answers = {"a": {"bytes": 110, "lacks": [], "says": None},
               "b": {"bytes": 70, "lacks": [], "says": None},
               "c": {"bytes": 300, "lacks": ["batch"], "says": None}, "d": {"no": "no LoRA"}}
    planner = {i: {"bytes": 101, "lacks": [], "says": None} for i in "abcd"}
    s = memory_peers.summary(answers, rows, planner)
    assert s["full"]["rows"] == 2 and s["full"]["mean"] == pytest.approx(0.2)
    assert s["full"]["worst"] == pytest.approx(0.3)
    assert s["full"]["mean_held_out"] == pytest.approx(0.3)
    assert s["full"]["planner_mean"] == pytest.approx(0.01)
    assert s["nearly"]["rows"] == 1 and s["nearly"]["worst"] == pytest.approx(2)
    assert s["lacks"] == {"batch": 1} and s["no"] == {"no LoRA": 1}


@pytest.mark.parametrize("says, promised, refused", [
    ("fits", [1, 1], [0, 1]), ("unsure", [0, 1], [0, 1]), ("does not fit", [0, 1], [1, 1])])
def test_only_a_plain_word_counts_as_a_promise_or_a_refusal(says, promised, refused):
    rows = [toy("a", 9, "out of memory", 1), toy("b", 9, limit=1), toy("c", 9)]
    answers = {i: {"bytes": 9, "lacks": [], "says": says} for i in "abc"}
    found = memory_peers.verdicts(answers, rows)
    assert found == {"promised": promised, "refused": refused}


# --- the page ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def text():
    return planner_tables.planner_accuracy(ROOT, table)


def test_the_page_shows_every_row_and_every_tool(text):
    for row in ROWS:
        assert text.count(f"{row['model']}, ") >= 1
    assert len(re.findall(r", \d+ layers", text.partition("### Beside public")[0])) == len(ROWS)
    for tool in STORED["tools"].values():
        assert tool["version"] is None or tool["version"] in text
    for name in planner_tables.ASKED:
        assert name in text


def test_the_page_shows_every_public_report(text):
    """Each once, with its verdict; a link where the source is a repository or a thread."""
    assert "All 89 public reports" in text
    part = "\n".join(planner_tables.reports(table, memory_cases))
    rows = [line.split(" | ") for line in part.splitlines() if line.count(" | ") == 5][1:]
    assert len(rows) == len(memory_cases.cases()) == 89
    counts = re.findall(r"^(right|wrong|undecidable|not planned) \| (\d+) \|", part, re.M)
    assert [(v, sum(row[4] == v for row in rows)) for v, _ in counts] \
        == [(v, int(n)) for v, n in counts] and len(counts) == 4
    assert sum("https://github.com/" in row[0] for row in rows) >= 80
    assert "index id" not in part and all(row[5] for row in rows)


@pytest.mark.parametrize("text, expected", [
    ("owner/repo issue 12", '<a href="https://github.com/owner/repo/issues/12">owner/repo#12</a>'),
    ("o/r PR 3 tools/README.md", '<a href="https://github.com/o/r/pull/3">o/r#3</a>'),
    ("o/r docs/file.md (torch 2.1)", '<a href="https://github.com/o/r">o/r</a>'),
    ("o/r", '<a href="https://github.com/o/r">o/r</a>'),
    ("public file, index id 12 (a <log>)", "public file"),
    ("torchtune docs, QLoRA tutorial", "torchtune docs, QLoRA tutorial")])
def test_sources_become_links(text, expected):
    assert planner_tables.source(text) == expected


def test_the_page_follows_the_stored_answers(tmp_path):
    """A tool whose answers are all right has no error on the page; one that is off has one."""
    place = tmp_path / planner_tables.RESULTS
    place.mkdir(parents=True)
    for name in planner_tables.MEASURED:
        (place / f"{name}.json").write_bytes(
            (ROOT / planner_tables.RESULTS / f"{name}.json").read_bytes())
    answers = {r["id"]: {"bytes": 2 * memory_peers.peak_of(r), "lacks": [], "says": None}
               for r in ROWS if r["outcome"] == "ok"}
    stored = {"provenance": {"when": "2026-01-02T00:00:00Z"}, "results": {
        "tools": {"accelerate": {"version": "9.8.7", "answers": answers}}}}
    (place / "memory_peers.json").write_text(json.dumps(stored))
    blocks = "\n".join(planner_tables.peers(tmp_path, table, memory_peers))
    assert re.search(r"accelerate 9\.8\.7 \| 86 \| 100\.00 % \| 100\.00 % \| 0 \|", blocks)
    assert "2026-01-02" in blocks


def test_the_stamp_changes_with_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_tables, "version", lambda root: "1")
    place = tmp_path / planner_tables.RESULTS
    place.mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    first = planner_tables.stamp(tmp_path)
    assert planner_tables.stamp(tmp_path) == first
    (place / "memory_peers.json").write_text("{}")
    assert planner_tables.stamp(tmp_path) != first


def test_text_of_the_same_files_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_tables, "version", lambda root: "1")
    (tmp_path / "_generated").mkdir()
    kept = planner_tables.stamp(tmp_path) + "as it was\n"
    (tmp_path / "_generated/planner_accuracy.md").write_text(kept)
    assert planner_tables.planner_accuracy(tmp_path, table) == kept
    monkeypatch.setattr(planner_tables, "version", lambda root: "2")
    with pytest.raises(Refused, match="memory_truth.json is missing"):
        planner_tables.planner_accuracy(tmp_path, table)


def test_html_blocks_have_no_blank_line_inside(text):
    """A blank line would end the block, and Markdown would read the rest."""
    block = text[text.index("<details>"):text.index("</details>")]
    assert "\n\n" not in block
