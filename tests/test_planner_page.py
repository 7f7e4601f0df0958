"""The planner's page without a browser: its addresses, its form, its answers, its files."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest

import planner_files
from companion import cli, planner_page
from companion.planner import Job, find_device, plan
from companion.planner_models import find_model

ROOT = Path(__file__).parents[1]
FILES = planner_files.names()


class Form(HTMLParser):
    """Inputs by name, with what a browser would send at first; unbalanced tags."""

    VOID = {"input", "progress", "option", "br"}

    def __init__(self, text):
        super().__init__()
        self.values, self.choices, self.open, self.select, self.labels = {}, {}, [], None, set()
        self.ids = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        self.ids.add(a.get("id"))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "label":
            self.labels.add(a["for"])
        if tag in ("input", "textarea"):
            self.values[a["name"]] = "0" if a.get("type") == "checkbox" else a.get("value", "")
        if tag == "select":
            self.select = a["name"]
            self.choices[self.select] = []
        if tag == "option" and self.select:
            self.choices[self.select].append(a["value"])
            if "selected" in a:
                assert self.select not in self.values
                self.values[self.select] = a["value"]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "select":
            self.select = None


FORM = Form(planner_page.form_html())


# --- addresses ---------------------------------------------------------------------------------

def test_an_empty_address_is_the_default_set_up():
    assert planner_page.read("") == (find_model("llama-2-7b"), Job(), find_device("24GiB"))


def test_an_address_names_what_differs():
    query = urlencode({"model": "GPT-2 small", "gpu": "", "method": "lora", "checkpointing": "1",
                       "batch": " 3 ", "share": "0.5"})
    assert planner_page.read(query) == (
        find_model("gpt-2 small"), Job(method="lora", checkpointing=True, batch=3, share=0.5), None)


def test_a_configuration_replaces_the_name():
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 100}
    model = planner_page.read(urlencode({"model": "nonsense", "config": json.dumps(config)}))[0]
    assert (model.layers, model.hidden, model.vocab) == (2, 64, 100)


BAD = [
    ("model=", "model:"), ("model=lama-2-7b", "Llama-2-7B"), ("colour=1", "no option 'colour'"),
    ("batch=1e3", "batch"), ("batch=-1", "batch"), ("batch=", "batch"), ("share=x", "share"),
    ("share=nan", "share"), ("share=inf", "share"), ("kv_bits=99", "kv_bits"),
    ("upcast=yes", "upcast"), ("method=magic", "method"), ("gpu=24", "24GiB"), ("gpu=h1", "H1"),
    ("tensor=3&gpus=3", "32 heads"), ("gpus=3&tensor=2", "3 GPUs"), ("shard=3", "one process"),
    ("method=inference&checkpointing=1", "inference"), ("batch=" + "9" * 5000, "batch"),
    ("config=%7B", "not JSON"), ("config=[]", "object"), ("config=" + "[" * 500, "not JSON"),
    ("config=" + "[" * 501, "nests"), ("config=%7B%7D", "model_type"),
    ("model=%3Cb%3E%C3%A9", "<b>é"), ("model=none.json", "none"),
]


@pytest.mark.parametrize("call", ["answer", "advice", "as_json"])
@pytest.mark.parametrize("query, word", BAD)
def test_a_mistake_is_one_line(call, query, word):
    found = json.loads(getattr(planner_page, call)(query))
    assert list(found) == ["error"] and "\n" not in found["error"]
    assert word.lower() in found["error"].lower()


QUERIES = ["", "method=qlora&rank=8&checkpointing=1&gpu=",
           "model=GPT-2+small&kv_bits=8.5&method=inference&sequence=512&new_tokens=7",
           "gpus=4&shard=3&gpu=rtx+4090&loss=chunked"]


@pytest.mark.parametrize("query", QUERIES)
def test_the_command_shown_asks_the_same(query, capsys):
    words = shlex.split(planner_page.command(query))
    assert words[:1] == ["companion"]
    assert cli.main([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(planner_page.as_json(query))


# --- the form ----------------------------------------------------------------------------------

def test_the_form_asks_for_every_field_once_and_starts_with_its_default():
    assert list(FORM.values) and set(FORM.values) == {f.name for f in fields(Job)} | {
        "model", "config", "gpu"}
    assert planner_page.read(urlencode(FORM.values)) == planner_page.read("")
    assert FORM.open == []


def test_every_input_has_a_label():
    assert {f"plan-{name}" for name in FORM.values} <= FORM.labels & FORM.ids


def test_every_choice_is_one_that_a_job_takes():
    for name, choices in FORM.choices.items():
        kind = type(getattr(Job(), name))
        for choice in choices:
            more = {"gpus": 2} if name == "shard" else {}
            assert getattr(replace(Job(**more), **{name: kind(choice)}), name) == kind(choice)


def test_the_form_offers_all_that_a_job_knows():
    """The message about a wrong value lists the known ones."""
    for name, choices in FORM.choices.items():
        line = json.loads(planner_page.answer(f"{name}=99"))["error"]
        assert line.startswith(f"{name} must be one of {', '.join(choices)}, got")


# --- answers -----------------------------------------------------------------------------------

def test_an_answer_shows_what_the_plan_says():
    p = plan("llama-2-7b", gpu="24GiB")
    found = json.loads(planner_page.answer(""))
    assert found["advise"] and found["verdict"].startswith("24GiB")
    for nbytes in (p.allocated, *p.reserved, *p.on_device, *(m.total for m in p.moments)):
        assert f"{nbytes / 2**30:.2f} GiB" in found["html"]
    assert found["html"].count(f"<strong>{p.peak.name}: the peak</strong>") == 1
    assert "<p>" not in planner_page.advice_html(replace(p, device=None), "")


def test_bars_are_as_long_as_what_they_stand_for():
    p = plan("llama-2-7b", gpu="24GiB")
    top = p.on_device[1]
    stacks = re.findall(r'<span class="bar" aria-hidden="true">(.*?)</span>',
                        planner_page.answer_html(p, ""))
    lengths = [sum(map(float, re.findall(r'<i [^>]*width:([\d.]+)%', s))) for s in stacks]
    expected = [p.allocated, p.reserved[1], p.on_device[1], *(m.total for m in p.moments)]
    assert lengths == pytest.approx([100 * n / top for n in expected], abs=0.02)
    assert all(f'left:{100 * 24 * 2**30 / top:.3f}%' in s for s in stacks)


def test_advice_leads_to_set_ups_that_fit():
    html = json.loads(planner_page.advice("method=lora"))["html"]
    links = re.findall(r'href="#([^"]+)"', html)
    assert links
    for query in links:
        made = planner_page.read(query.replace("&amp;", "&"))
        assert planner_page.make_plan(*made).verdict == "fits"


def test_what_a_reader_typed_is_text_and_not_html():
    config = json.dumps({"model_type": "<script>", "hidden_size": 64, "intermediate_size": 128,
                         "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 100})
    html = json.loads(planner_page.answer(urlencode({"config": config, "gpu": "1GiB"})))["html"]
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_examples_say_what_their_texts_say():
    html = planner_page.examples_html()
    row = r'<th scope="row"><a href="#example-\d">(.*?)</a>.*?<td>([^<]*)</td></tr>'
    verdicts = dict(re.findall(row, html))
    assert len(verdicts) == len(planner_page.EXAMPLES)
    assert verdicts["All weights, pure bf16, AdamW"] == "does not fit"
    assert verdicts["QLoRA with checkpointing"] == "fits"
    assert "\n\n" not in html and not Form(html).open


# --- the files ---------------------------------------------------------------------------------

def test_the_shipped_files_are_enough(tmp_path):
    """Alone in a folder, without site packages, they answer as here."""
    for name in FILES:
        (tmp_path / "companion" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "companion" / name, tmp_path / "companion" / name)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from companion import planner_page as p\n"
            "print(p.as_json(sys.argv[2])); assert p.__file__.startswith(sys.argv[1])")
    query = "model=GPT-2+small&method=lora&gpu=1GiB"
    made = subprocess.run([sys.executable, "-I", "-S", "-c", code, tmp_path, query],
                          capture_output=True, text=True)
    assert made.stdout.strip() == planner_page.as_json(query), made.stderr


def test_every_byte_of_the_files_changes_their_version(tmp_path):
    for name in ("planner.mjs", "planner_worker.mjs"):
        (tmp_path / "_static").mkdir(exist_ok=True)
        shutil.copy(ROOT / "_static" / name, tmp_path / "_static")
    for name in FILES:
        (tmp_path / "companion" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "companion" / name, tmp_path / "companion" / name)
    seen = {planner_files.version(tmp_path)}
    assert seen == {planner_files.version()}
    files = [tmp_path / "companion" / name for name in FILES]
    for file in [*files, tmp_path / "_static/planner.mjs", tmp_path / "_static/planner_worker.mjs"]:
        file.write_bytes(file.read_bytes() + b" ")
        seen.add(planner_files.version(tmp_path))
    assert len(seen) == len(FILES) + 3


def test_pages_are_made_anew_only_for_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr(planner_files, "version", lambda root: "v1")
    monkeypatch.setattr(planner_files, "megabytes", lambda root: 1)
    (tmp_path / "companion").mkdir()
    made = planner_files.planner_pages(tmp_path)
    assert set(made) == {"planner_form", "planner_examples"}
    (tmp_path / "_generated").mkdir()
    for name, text in made.items():
        (tmp_path / f"_generated/{name}.md").write_text(text + "kept")
    again = planner_files.planner_pages(tmp_path)
    assert all(text.endswith("kept") for text in again.values())
    monkeypatch.setattr(planner_files, "version", lambda root: "v2")
    assert not any(t.endswith("kept") for t in planner_files.planner_pages(tmp_path).values())


# Catches a rounded total: rounded up, it is never reached and the page never says that it starts.
@pytest.mark.parametrize("nbytes", [12_315_543, 12_315_449, 1])
def test_the_form_holds_the_total_to_the_byte(nbytes):
    held = re.search(r'data-megabytes="([\d.]+)"', planner_page.form_html(megabytes=nbytes / 1e6))[1]
    assert float(held) == nbytes / 1e6
