"""The front page, its table, the glossary, the references and what goes with a release."""
import csv
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import thesis  # noqa: E402
from companion.hardware import GPUS  # noqa: E402
from notebooks import Refused  # noqa: E402

INTRO = (ROOT / "intro.md").read_text(encoding="utf-8")
CLAIMS = {row["id"]: row for row in thesis.read_claims()}
LINK = re.compile(r'<a href="_generated/claims\.html#(C\w+)"[^>]*>([^<]*)</a>')


# Catches a claim that was split, renamed or withdrawn while the front page still leans on it.
@pytest.mark.parametrize("id", sorted({*thesis.claim_ids(), *(i for i, _ in LINK.findall(INTRO))}))
def test_the_front_page_leans_on_checked_claims(id):
    assert CLAIMS[id]["status"] == "checked"


def test_links_show_the_id_they_lead_to():
    links = LINK.findall(INTRO)
    assert len(links) >= 4 and all(id == shown for id, shown in links)
    assert "claims.html" not in LINK.sub("", INTRO)  # no link of another form escapes the tests


# Catches a figure retyped wrong, or left behind when its claim changed.
@pytest.mark.parametrize("technique", thesis.TABLE)
def test_numbers_in_the_table_stand_in_its_claims(technique):
    for phrase, ids in thesis.TABLE[technique].values():
        said = " ".join(CLAIMS[id]["statement"] for id in ids)
        assert numbers(phrase) <= numbers(said), (phrase, said)


def numbers(text):
    """The numbers in a text, so that 14 is found in 14.00 and 7 in 7B."""
    return {float(n.replace(",", "")) for n in re.findall(r"\d+(?:[.,]\d+)*", text)}


# The story's figures, with the claim each is linked to: a claim reworded to another figure
# must fail here.
@pytest.mark.parametrize("id, figures", [
    ("C001", {7, 14, 24}), ("C095", {7, 112}), ("C004", {7, 8, 24})])
def test_the_story_tells_its_claims_numbers(id, figures):
    assert figures <= numbers(CLAIMS[id]["statement"])
    assert figures <= numbers(INTRO)


def checked(*ids, status="checked"):
    return [{"id": id, "statement": 'a | b "c"', "status": status} for id in ids]


def test_the_table():
    lines = thesis.thesis_markdown(checked(*thesis.claim_ids())).splitlines()
    assert len(lines) == 2 + len(thesis.TABLE)
    assert {line.count("|") for line in lines} == {2 + len(thesis.COLUMNS)}  # a | in a claim
    for line, (name, row) in zip(lines[2:], thesis.TABLE.items()):
        first, *cells = line.strip("| ").split(" | ")
        assert first == name
        assert [c == thesis.NOT_YET for c in cells] == [c not in row for c in thesis.COLUMNS]


@pytest.mark.parametrize("claims, said", [
    ([], "is not in companion/claims.csv"),
    (checked(*thesis.claim_ids(), status="withdrawn"), "is withdrawn, not checked")])
def test_the_table_refuses_what_is_not_checked(claims, said):
    with pytest.raises(Refused, match=said):
        thesis.thesis_markdown(claims)


def test_columns_are_known():
    assert all(set(row) <= set(thesis.COLUMNS) and row for row in thesis.TABLE.values())


def test_the_front_page_is_short():
    assert len(re.sub(r"<[^>]*>", "", INTRO).split()) < 950


# --- glossary ---------------------------------------------------------------

def glossary():
    """Term -> definition, in the order of the file."""
    body = (ROOT / "glossary.md").read_text(encoding="utf-8").split("```{glossary}\n")[1]
    body = body.rsplit("```", 1)[0]
    entries = [block.split("\n", 1) for block in body.strip().split("\n\n")]
    return [(term, " ".join(text.split())) for term, text in entries]


def test_glossary_is_alphabetical_without_doubles():
    terms = [term.lower() for term, _ in glossary()]
    assert terms == sorted(set(terms)) and len(terms) >= 60


# Catches a term without an explanation, and an explanation that became a lecture.
@pytest.mark.parametrize("term, text", glossary())
def test_definitions_are_short_sentences(term, text):
    assert text.endswith(".") and 8 <= len(text.split()) <= 60


# --- references, licences, release ------------------------------------------

def references():
    with open(ROOT / "references.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_references_are_complete_and_sorted():
    rows = references()
    assert list(rows[0]) == ["key", "authors", "year", "title", "venue", "url"]
    keys = [row["key"] for row in rows]
    assert keys == sorted(set(keys))
    assert len({row["url"] for row in rows}) == len(rows)
    for row in rows:
        assert all(row.values()), row
        assert re.fullmatch(r"https://\S+", row["url"]), row
        assert re.fullmatch(r"(19|20)\d\d", row["year"]), row


# Catches a source that the list of references leaves out: the claims' and the hardware's.
def test_every_source_is_a_reference():
    urls = {row["url"].split("#")[0] for row in references()}
    sources = [c["source"] for c in CLAIMS.values()] + [g.source for g in GPUS.values()]
    assert {u.split("#")[0] for u in re.findall(r"https://\S+", " ".join(sources))} <= urls


# An arXiv number begins with the year and month of its first version, so none can be younger
# than the year given; the venue's year may be later.
@pytest.mark.parametrize("row", [r for r in references() if "arxiv.org" in r["url"]],
                         ids=lambda r: r["key"])
def test_arxiv_numbers_are_of_their_year(row):
    year, number = re.search(r"arxiv\.org/abs/(\d\d)\d\d\.(\d{4,5})$", row["url"]).groups()
    assert len(number) == (5 if int(year) >= 15 else 4)
    assert 0 <= int(row["year"]) - (2000 + int(year)) <= 2
    assert row["year"] in row["key"]


def test_licences_are_whole():
    code = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in code and "END OF TERMS AND CONDITIONS" in code
    text = (ROOT / "LICENSE-text").read_text(encoding="utf-8")
    assert all(f"Section {n} – " in text for n in range(1, 9))
    assert text.endswith("creativecommons.org.\n")


def test_versions_and_address_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nrepository-code: {project['urls']['Repository']}\n" in citation
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
