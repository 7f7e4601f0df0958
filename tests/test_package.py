"""The package as a reader meets it: installing, importing, reporting, checking."""
import compileall
import os
import subprocess
import sys
import time
import zipfile

import numpy
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import companion
from companion import device, exercise, magics, report
from notebooks import ROOT


def python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **environment})
    return done.stdout.strip(), done.stderr


def test_import_is_fast_and_leaves_torch_alone():
    code = ("import sys, time; t = time.perf_counter(); import companion; "
            "print(time.perf_counter() - t < 0.3, 'torch' in sys.modules)")
    assert python(code)[0] == "True False"


@pytest.mark.parametrize("name", companion.__all__)
def test_every_public_name_exists_and_is_documented(name):
    assert getattr(companion, name) is not None
    if callable(getattr(companion, name)):
        assert getattr(companion, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        companion.nothing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    from sandbox import build_wheel
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_compiles_and_requires_nothing(wheel, tmp_path):
    # A published package with a syntax error, or one that replaces a reader's numpy, both happened to others.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
        assert "Requires-Dist" not in archive.read(metadata).decode()
        assert "companion/claims.csv" in archive.namelist()
        assert {n.split("/")[0] for n in archive.namelist()} == {"companion", metadata.split("/")[0]}
    assert compileall.compile_dir(tmp_path / "companion", quiet=1)


def test_a_wheel_with_a_syntax_error_would_be_seen(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert not compileall.compile_dir(tmp_path, quiet=2)


def test_standard_library_modules_import_nothing_else():
    # They also run in the browser, where there is no torch and no numpy.
    code = ("import sys; before = set(sys.modules); import companion.memory, companion.hardware; "
            "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in ('torch', 'numpy')))")
    assert python(code) == ("[]", "")


@pytest.mark.parametrize("x, spec, expected", [
    (0.8771, ".3f", "‹   0.877›"), (1234567, None, "‹1.23e+06›"), ("cpu", None, "‹     cpu›"),
    (numpy.float32(0.5), ".1f", "‹     0.5›"), (torch.tensor(0.5), ".1f", "‹     0.5›"), (True, "", "‹    True›"),
    (float("nan"), ".1f", "‹     nan›"), (float("-inf"), None, "‹    -inf›"), (-0.0, ".1f", "‹    -0.0›")])
def test_measured_has_a_fixed_width(x, spec, expected):
    assert report.measured(x, spec) == expected


@pytest.mark.parametrize("text", ["a‹b", "a›b", "a\nb"])
def test_measured_refuses_what_would_break_the_comparison(text):
    with pytest.raises(ValueError, match="marker or a line break"):
        report.measured(text)


def test_measured_widens_for_readers_only(monkeypatch):
    monkeypatch.delenv("COMPANION_STRICT", raising=False)
    assert report.measured("NVIDIA GeForce") == "‹NVIDIA GeForce›"
    monkeypatch.setenv("COMPANION_STRICT", "1")
    with pytest.raises(ValueError, match="needs width=14, not 8"):
        report.measured("NVIDIA GeForce")


@pytest.fixture
def one_claim(monkeypatch):
    rows = {"C001": report.Claim("C001", "memory", "It is 42.", "exact", "checked", "equal", "", ""),
            "C002": report.Claim("C002", "memory", "Fast.", "opinion", "withdrawn", "no measure", "", "")}
    monkeypatch.setattr(report, "claims", lambda: rows)
    monkeypatch.setenv("COMPANION_STRICT", "1")


@pytest.mark.parametrize("holds", [True, numpy.bool_(True), torch.tensor(True), torch.tensor([True]).all()])
def test_a_claim_that_holds(one_claim, capsys, holds):
    report.claim("C001", holds)
    assert capsys.readouterr().out == "✓ C001 It is 42.\n"


def test_a_false_claim_fails_where_the_book_is_checked(one_claim):
    with pytest.raises(report.ClaimFailed, match="C001 does not hold here: It is 42. Seen here: 41. Asserted: equal"):
        report.claim("C001", False, seen=41)


def test_a_false_claim_is_a_line_for_a_reader(one_claim, monkeypatch, capsys):
    monkeypatch.delenv("COMPANION_STRICT")
    report.claim("C001", False, seen=41)
    assert capsys.readouterr().out == ("✗ C001 did not hold on this machine: It is 42. Seen here: 41.\n"
                                       "  Elsewhere: equal\n")


@pytest.mark.parametrize("id, holds, message", [
    ("C003", True, "no 'C003' in claims.csv; near: C00"),
    (7, True, "no 7 in claims.csv"),
    ("C002", True, "C002 is withdrawn"),
    ("C001", 0.93, "needs True or False, got 0.93"),
    ("C001", "yes", "needs True or False, got 'yes'"),
    ("C001", None, "needs True or False, got None")])
def test_a_misused_claim_is_an_error_even_for_a_reader(one_claim, monkeypatch, id, holds, message):
    monkeypatch.delenv("COMPANION_STRICT")
    with pytest.raises(ValueError, match=message):
        report.claim(id, holds)


def test_the_books_claims_load():
    assert report.claims()["C001"].chapter == "memory"


@pytest.fixture
def one_exercise(monkeypatch):
    def double(answer):
        for x in (3, 0, -1):
            if (got := answer(x)) != 2 * x:
                raise exercise.Wrong(f"for x = {x}: expected {2 * x}, got {got}")
    monkeypatch.setattr(exercise, "_checks", lambda: {"demo-1": double})


@pytest.mark.parametrize("answer, line", [
    (lambda x: ..., "not attempted"),
    (lambda x: None, "not attempted"),
    (lambda x: print(end=""), "not yet. for x = 3: expected 6, got None"),
    (None, "not attempted"),
    (..., "not attempted"),
    (lambda x: x * x, "not yet. for x = 3: expected 6, got 9"),
    (lambda x: abs(2 * x), "not yet. for x = -1: expected -2, got 2"),
    (lambda x: 1 / x, "not yet. for x = 3: expected 6, got 0.3333333333333333"),
    (lambda x: 6 if x == 3 else 1 / x, "not yet. Your code raised ZeroDivisionError: division by zero"),
    (7, "not yet. expected a function, got int"),
    (lambda x: 2 * x, "right")])
def test_check_says_what_helps(one_exercise, capsys, answer, line):
    exercise.check("demo-1", answer)
    assert capsys.readouterr().out == f"demo-1: {line}\n"


def test_check_names_the_nearest_exercise(one_exercise):
    with pytest.raises(ValueError, match="no exercise 'demo-2'; did you mean 'demo-1'"):
        exercise.check("demo-2", None)


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)])
def test_dtype_by_capability_not_by_emulation(monkeypatch, capability, dtype):
    # A T4 says that it supports bfloat16; it only emulates it.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    assert device.pick_dtype("cuda") == dtype


def test_the_cpu_computes_in_bfloat16():
    assert device.pick_dtype("cpu") == torch.bfloat16


def test_apples_gpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.pick_device().type == "cpu"


@pytest.fixture
def shell(monkeypatch):
    shell = InteractiveShell()
    magics.register(shell)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    yield shell
    InteractiveShell.clear_instance()


def test_needs_gpu_says_what_it_needs(shell, monkeypatch, capsys):
    monkeypatch.setattr(magics, "_gpu_count", lambda: 1)
    shell.run_cell_magic("needs_gpu", "2", "print('ran')")
    out = capsys.readouterr().out
    assert "needs 2 CUDA GPUs; this machine has 1" in out and "ran" not in out


def test_needs_gpu_runs_in_the_notebooks_names(shell, monkeypatch, capsys):
    monkeypatch.setattr(magics, "_gpu_count", lambda: 1)
    shell.user_ns["x"] = 20
    shell.run_cell_magic("needs_gpu", "", "y = x + 1\nprint(y)")
    assert capsys.readouterr().out == "21\n" and shell.user_ns["y"] == 21


def test_an_error_in_a_gpu_cell_reaches_the_cell(shell, monkeypatch):
    monkeypatch.setattr(magics, "_gpu_count", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("needs_gpu", "", "1 / 0")


def test_needs_gpu_wants_a_count(shell):
    with pytest.raises(ValueError, match="a number of GPUs, got 'two'"):
        shell.run_cell_magic("needs_gpu", "two", "pass")
