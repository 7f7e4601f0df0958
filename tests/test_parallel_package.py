"""The chapters show the stored runs of the parallel benchmarks."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import parallel_package  # noqa: E402


def test_the_chapters_show_the_stored_runs():
    """``parallel_package.py`` was run after the last measurement."""
    assert json.loads(parallel_package.PACKAGED.read_text()) == parallel_package.packaged()


def test_every_number_of_gpus_is_found(tmp_path):
    row = {"collective": "all_reduce", "bytes": 8, "seconds": 1, "bus_bytes_per_s": 8,
           "link_bytes_per_s": None, "took": 2}
    failed = {"name": "TP", "error": "no", "seconds": None, "took": 1}
    for name, rows in ("bandwidth_2", [row]), ("bandwidth_8", [row]), ("steps_8", [failed]), ("steps_8_again", []):
        stored = {"provenance": {"when": name}, "results": {"rows": rows}}
        (tmp_path / f"parallel_{name}.json").write_text(json.dumps(stored))
    found = parallel_package.packaged(tmp_path)
    assert set(found) == {"2", "8"} and "steps" not in found["2"]
    assert found["8"]["steps"] == [{"name": "TP", "error": "no"}]
    assert found["8"]["steps_again"] == []
    assert "took" not in found["8"]["bandwidth"][0]
    assert found["8"]["provenance"]["steps"] == {"when": "steps_8"}
