"""Fetching again what is kept below _static: from an npm that is not there."""
import base64
import hashlib
import io
import stat
import tarfile

import pytest

import vendor

FILES = {"a.js": b"one", "fonts/b.woff": b"two"}


def archive(files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, body in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return made.getvalue()


def serve(tmp_path, monkeypatch, files, digest=None):
    """An npm whose package holds ``files``, and a _static that should hold FILES."""
    (tmp_path / "package.tgz").write_bytes(archive(files))
    npm = tmp_path / "bin/npm"
    npm.parent.mkdir()
    npm.write_text('#!/bin/sh\n[ "$5" = thing@1.0 ] || exit 1\n'
                   f'cp {tmp_path}/package.tgz "$4/thing-1.0.tgz"; echo thing-1.0.tgz\n')
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=":")
    folder = tmp_path / "static/thing"
    folder.mkdir(parents=True)
    (folder / "LICENSE").write_text("yours")
    sums = {n: hashlib.sha256(b).hexdigest() for n, b in {"LICENSE": b"yours", **FILES}.items()}
    (folder / "SHA256SUMS").write_text("".join(f"{s}  ./{n}\n" for n, s in sums.items()))
    found = hashlib.sha512((tmp_path / "package.tgz").read_bytes()).digest()
    monkeypatch.setattr(vendor, "STATIC", tmp_path / "static")
    monkeypatch.setattr(vendor, "PACKAGES", {
        "thing": ("1.0", digest or base64.b64encode(found).decode(), "package/")})
    return folder


def test_what_is_listed_is_fetched_and_nothing_else(tmp_path, monkeypatch, capsys):
    folder = serve(tmp_path, monkeypatch, {**FILES, "more.js": b"three"})
    vendor.main([])
    assert capsys.readouterr().out == "thing: 2 files\n"
    assert {n: (folder / n).read_bytes() for n in FILES} == FILES
    assert not (folder / "more.js").exists() and (folder / "LICENSE").read_text() == "yours"


@pytest.mark.parametrize("files, digest, names, word", [
    (FILES, "another", [], "digest"),
    ({**FILES, "a.js": b"changed"}, None, [], "a.js differ"),
    ({"a.js": b"one"}, None, [], "lacks fonts/b.woff"),
    (FILES, None, ["nothing"], "no 'nothing'"),
])
def test_anything_else_is_refused_and_nothing_is_written(
        files, digest, names, word, tmp_path, monkeypatch):
    folder = serve(tmp_path, monkeypatch, files, digest)
    with pytest.raises(SystemExit) as refused:
        vendor.main(names)
    assert word in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(p.name for p in folder.rglob("*")) == ["LICENSE", "SHA256SUMS"]


def test_a_newer_release_is_listed_anew(tmp_path, monkeypatch):
    folder = serve(tmp_path, monkeypatch, {**FILES, "a.js": b"newer"})
    vendor.main(["--write"])
    listed = vendor.listed(folder)
    assert listed["a.js"] == hashlib.sha256(b"newer").hexdigest()
    assert listed["LICENSE"] == hashlib.sha256(b"yours").hexdigest()


def test_every_folder_that_is_kept_can_be_fetched_again():
    folders = {p.parent.name for p in vendor.STATIC.rglob("SHA256SUMS")}
    assert folders == set(vendor.PACKAGES)


@pytest.mark.parametrize("name", vendor.PACKAGES)
def test_what_is_kept_is_named_with_its_license(name):
    text = (vendor.STATIC.parent / "THIRD_PARTY.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if f"`_static/{name}`" in line)
    assert vendor.PACKAGES[name][0] in row and f"`_static/{name}/LICENSE`" in row
    assert "LICENSE" in vendor.listed(vendor.STATIC / name)
