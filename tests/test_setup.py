"""Setting up, and what it says when it cannot. Nothing large is installed here."""
import builtins
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

import setup_env
from notebooks import ROOT

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose only requirement is itself a small package on this disk."""
    package = tmp_path / "tiny"
    package.mkdir()
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1"\n')
    (package / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, *a, **k):\n"
        "    name = 'tiny-1-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(f'{folder}/{name}', 'w') as z:\n"
        "        z.writestr('tiny.py', ''); i = 'tiny-1.dist-info/'\n"
        "        z.writestr(i + 'METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n')\n"
        "        z.writestr(i + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        z.writestr(i + 'RECORD', '')\n"
        "    return name\n")
    (tmp_path / "requirements-book.txt").write_text(f"{package}  # a comment\n")
    (tmp_path / "constraints-book.txt").write_text("")
    monkeypatch.setattr(setup_env, "ROOT", str(tmp_path))
    return tmp_path


def test_sets_up_once_and_again_when_the_requirements_change(project, capfd):
    setup_env.main(["book"])
    python = project / ".venv/book/bin/python"
    assert subprocess.run([python, "-c", "import tiny"]).returncode == 0
    assert "ready" in capfd.readouterr().out
    setup_env.main(["book"])
    assert capfd.readouterr().out == ""
    (project / "constraints-book.txt").write_text("# changed\n")
    setup_env.main(["book"])
    out = capfd.readouterr().out
    assert "ready" in out and "making the environment" not in out


def test_goes_on_after_being_stopped_in_the_middle(project, monkeypatch, capfd):
    monkeypatch.setattr(setup_env, "pip", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        setup_env.main(["book"])
    monkeypatch.undo()
    monkeypatch.setattr(setup_env, "ROOT", str(project))
    capfd.readouterr()
    setup_env.main(["book"])
    out = capfd.readouterr().out
    assert "ready" in out and "making the environment" not in out


def test_a_half_made_environment_is_made_again(project, capfd):
    (project / ".venv/book/bin").mkdir(parents=True)
    (project / ".venv/book/bin/python").write_text("#!/bin/sh\nexit 1\n")
    (project / ".venv/book/bin/python").chmod(0o755)
    setup_env.main(["book"])
    assert "making the environment" in capfd.readouterr().out


def test_what_cannot_be_installed_is_one_line_and_not_called_ready(project):
    (project / "requirements-book.txt").write_text("no-such-folder/no-such-package\n")
    with pytest.raises(setup_env.Stop, match="no network\\? a full disk\\?.*goes on from here"):
        setup_env.main(["book"])
    assert setup_env.ready(str(project / ".venv/book")) == ""


def test_a_full_disk_is_told_before_anything_is_made(project, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 1e8))
    with pytest.raises(setup_env.Stop, match="needs 0.6 GB of disk and .* has 0.1 GB free"):
        setup_env.main(["book"])
    assert not (project / ".venv").exists()


def test_an_old_python_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(setup_env.Stop, match=r"needs Python 3.11 or newer.*make PYTHON="):
        setup_env.main(["book"])


def test_the_script_is_readable_by_old_pythons():
    # It must parse there to say so: no syntax newer than Python 3.6's.
    import ast
    ast.parse((ROOT / "tools/setup_env.py").read_text(), feature_version=(3, 6))


def test_a_python_without_venv_is_told_the_package(project, monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name == "ensurepip":
            raise ImportError(name)
        return real(name, *args)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(setup_env.Stop, match="apt-get install python3-venv"):
        setup_env.main(["book"])


def test_a_missing_browser_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    setup_env.install_browser()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "install chromium" in out


def test_a_browser_is_not_installed_by_an_ordinary_user(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "call", lambda *a, **k: pytest.fail("called apt-get"))
    setup_env.install_browser()
    assert "install chromium" in capsys.readouterr().out


def test_newest_drops_the_pins_and_keeps_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "ROOT", str(tmp_path))
    (tmp_path / "r.txt").write_text("# head\ntorch==2.14.1\ntriton==3.8.0; platform_system == \"Linux\"\n")
    assert setup_env.requirement_lines("r.txt", True) == ["torch", 'triton; platform_system == "Linux"']
    assert setup_env.requirement_lines("r.txt", False)[0] == "torch==2.14.1"
