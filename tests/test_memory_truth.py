"""The rows of the truth set and how a peak is read from the allocator's history."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import memory_score  # noqa: E402
import memory_truth  # noqa: E402
import memory_truth_parallel  # noqa: E402
from companion.memory import MiB  # noqa: E402
from companion.planner_models import from_config  # noqa: E402


def test_rows_are_distinct_and_half_of_each_group_is_held_out():
    rows = memory_truth.rows() + memory_truth_parallel.rows()
    assert len({r["id"] for r in rows}) == len(rows) >= 100
    definitions = {memory_truth.definition({**r, "id": "", "held_out": None}) for r in rows}
    assert len(definitions) == len(rows)
    for group in {r["group"] for r in rows}:
        held_out = [r["held_out"] for r in rows if r["group"] == group]
        assert abs(2 * sum(held_out) - len(held_out)) <= 1


def test_toy_rows_are_small_whatever_the_family():
    for row in memory_truth.rows():
        small = memory_truth.tiny(row)
        assert from_config(small["config"]).parameters < 500_000
        assert small["config"]["model_type"] == row["config"]["model_type"]


def test_the_fullest_moment_of_a_history():
    """5 + 3 MiB live together; then 5 are freed and 4 come, which is less."""
    def event(action, address, mebibytes):
        return {"action": action, "addr": address, "size": mebibytes * MiB}
    history = [event("alloc", 1, 5), event("alloc", 2, 3), event("free_requested", 1, 5),
               event("free_completed", 1, 5), event("alloc", 3, 3), event("alloc", 1, 1)]
    assert memory_truth.at_peak(history) == [[5 * MiB, 1], [3 * MiB, 1]]
    assert memory_truth.at_peak(history[3:]) == [[3 * MiB, 1], [1 * MiB, 1]]


def test_the_chapter_shows_the_stored_rows():
    """``memory_score.py --package`` was run after the last measurement."""
    assert json.loads(memory_score.PACKAGED.read_text()) == memory_score.packaged()


def test_components_are_differences_of_moments():
    def at(moment, step, allocated, peak):
        return {"moment": moment, "step": step, "allocated": allocated, "peak": peak}
    row = {"method": "full", "moments": [
        at("load", 0, 10, 12), at("forward", 0, 15, 16), at("loss", 0, 17, 17),
        at("backward", 0, 20, 25), at("step", 0, 40, 50), at("forward", 1, 35, 41),
        at("loss", 1, 37, 37), at("backward", 1, 40, 45), at("step", 1, 40, 50)]}
    peaks, parts = memory_score.moments_of(row)
    assert peaks == {"load": 10, "forward": 41, "loss": 37, "backward": 45, "step": 50}
    assert parts == {"weights": 10, "gradients": 10, "moments": 20, "logits": 2,
                     "temporaries": 10, "activations": 5}
