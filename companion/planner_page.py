"""The planner's page in the book: its form, its answers and its worked examples, as HTML.

    answer("model=llama-2-7b&method=lora&gpu=24GiB")   # JSON: {"html": ..., "advise": true}

The book is built with these functions, and the page runs the same files in the browser.
A set-up is the page's address: ``name=value`` pairs joined by ``&``, in which what is
missing has its default. The names are ``model``, ``config``, ``gpu`` and the fields of
``companion.planner.Job``.

Standard library only: this file also runs in a browser.
"""
import json
import shlex
from dataclasses import dataclass, fields
from html import escape
from urllib.parse import parse_qsl, urlencode

from .hardware import GPUS
from .planner import METHODS, OPTIMIZERS, RECIPES, TARGETS, Job, find, find_device, make_plan
from .planner_models import from_config, registry
from .planner_report import CHAPTER_OF, RECIPE_NAMES, describe, formula, size, verdict
from .planner_tape import KINDS

DEFAULTS = {"model": "Llama-2-7B", "config": "", "gpu": "24GiB"}
TRAINING = ("full", "lora", "qlora")
ADAPTERS = ("lora", "qlora")
INFERENCE = ("inference",)


# --- what is asked ----------------------------------------------------------------------------

def read(query):
    """(Model, Job, Device or None) of an address. Raises ValueError, in one line."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    kinds = {f.name: f.type for f in fields(Job)}
    if unknown := sorted(set(given) - set(kinds) - set(DEFAULTS)):
        raise ValueError(f"no option {unknown[0]!r}; there are {', '.join([*DEFAULTS, *kinds])}")
    options = {name: _value(name, given[name].strip(), kind)
               for name, kind in kinds.items() if name in given}
    given = {**DEFAULTS, **given}
    if given["config"].strip():
        model = from_config(_json(given["config"]))
    elif given["model"].strip():
        model = find(given["model"].strip())
    else:
        raise ValueError("model: give a name, a count such as 7B, or a configuration")
    return model, Job(**options), find_device(given["gpu"].strip() or None)


def _value(name, text, kind):
    """Text of a form as a value of a Job's field."""
    if kind is bool:
        if text not in ("", "0", "1"):
            raise ValueError(f"{name} must be 0 or 1, got {text!r}")
        return text == "1"
    if kind is str:
        return text
    try:
        value = float(text) if kind is float else int(text)
        return int(value) if value == int(value) else value
    except (ValueError, OverflowError):
        what = "number" if kind is float else "whole number"
        raise ValueError(f"{name} must be a {what}, got {text[:40]!r}") from None


def _json(text):
    if text.count("[") + text.count("{") > 500:  # a browser's stack is small
        raise ValueError("config is no model's: it nests or lists too much")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("config must be a JSON object, as config.json holds")
    return config


def command(query):
    """The same question for a terminal."""
    words, flags = ["companion", "plan"], {f.name for f in fields(Job) if f.type is bool}
    given = {**DEFAULTS, **dict(parse_qsl(query, keep_blank_values=True))}
    config = given.pop("config").strip()
    if config:
        given["model"] = ""
        words += ["--config", "config.json"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if name in flags:
            words += [flag] * (value == "1")
        elif value.strip():
            words += [flag, value.strip()]
    return shlex.join(words)


# --- what the browser calls: text in, JSON out ------------------------------------------------

def answer(query):
    """JSON: ``html`` and whether advice is worth a search (``advise``), or ``error``."""
    try:
        plan = make_plan(*read(query))
        advise = plan.verdict in ("tight", "does not fit")
        return json.dumps({"html": answer_html(plan, query), "advise": advise,
                           "verdict": verdict(plan)})
    except ValueError as error:
        return _error(error)


def advice(query):
    """JSON: ``html`` of the changes that would make it fit, or ``error``."""
    try:
        return json.dumps({"html": advice_html(make_plan(*read(query)), query)})
    except ValueError as error:
        return _error(error)


def as_json(query):
    """What ``companion plan --json`` prints, or ``{"error": line}``."""
    try:
        return json.dumps(make_plan(*read(query)).as_dict(), indent=1)
    except ValueError as error:
        return _error(error)


def _error(error):
    return json.dumps({"error": " ".join(str(error).split())})


# --- an answer --------------------------------------------------------------------------------

def _class(kind):
    return "part-" + kind.lower().replace(" ", "-")


def _stack(parts, top):
    """Blocks of a bar, one a component, in the order of KINDS."""
    return "".join(f'<i class="{_class(k)}" style="width:{100 * parts[k] / top:.3f}%"></i>'
                   for k in KINDS if parts.get(k))


def _band(low, high, top):
    """A bar up to ``low``, and a paler one from there to ``high``."""
    return (f'<i class="part-sure" style="width:{100 * low / top:.3f}%"></i>'
            f'<i class="part-perhaps" style="width:{100 * (high - low) / top:.3f}%"></i>')


def _bar(inside, plan, top):
    mark = ""
    if plan.device:
        mark = f'<b style="left:{100 * plan.device.bytes / top:.3f}%"></b>'
    return f'<span class="bar" aria-hidden="true">{inside}{mark}</span>'


def _rows(rows):
    """Table rows of (name, bytes, bar); each first cell heads its row."""
    return "".join(f'<tr><th scope="row">{name}</th><td class="size">{nbytes}</td>'
                   f'<td class="draw">{bar}</td></tr>' for name, nbytes, bar in rows)


def _table(caption, head, body):
    head = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (f'<table class="plan"><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _top(plan):
    """What the whole width of a bar stands for."""
    return max(plan.on_device[1], plan.device.bytes if plan.device else 0)


def _three(plan):
    """Allocated, reserved and on the device, as bars."""
    top = _top(plan)
    (r0, r1), (d0, d1) = plan.reserved, plan.on_device
    rows = [("Allocated", size(plan.allocated), _bar(_stack(plan.peak.parts, top), plan, top)),
            ("Reserved", f"{size(r0)} to {size(r1)}", _bar(_band(r0, r1, top), plan, top)),
            ("On the device", f"{size(d0)} to {size(d1)}", _bar(_band(d0, d1, top), plan, top))]
    line = f" The line is {escape(plan.device.name)}." if plan.device else ""
    caption = ("What tensors hold, what the allocator takes for them, and what the driver counts."
               + line)
    return _table(caption, ("At the peak", "Size", "Drawn"), _rows(rows))


def _timeline(plan):
    top = _top(plan)
    rows = []
    for m in plan.moments:
        name = escape(m.name)
        if m is plan.peak:
            name = f"<strong>{name}: the peak</strong> {escape(m.where)}"
        rows.append((name, size(m.total), _bar(_stack(m.parts, top), plan, top)))
    return _table("The fullest moment of each phase, in order.", ("Phase", "Allocated", "Drawn"),
                  _rows(rows))


def _components(plan):
    body = ""
    for kind, nbytes in sorted(plan.peak.parts.items(), key=lambda part: -part[1]):
        if nbytes:
            why = escape(formula(kind, plan))
            if kind in CHAPTER_OF:
                name = CHAPTER_OF[kind]
                why += f' (<a href="chapters/{name}.html">{name}</a>)'
            body += (f'<tr><th scope="row"><i class="key {_class(kind)}"></i>{kind}</th>'
                     f'<td class="size">{size(nbytes)}</td><td>{why}</td></tr>')
    return _table(f"What is held at the peak, in the phase {escape(plan.peak.name)}.",
                  ("Component", "Size", "Where it comes from"), body)


def answer_html(plan, query):
    """Everything but the advice. One line of HTML without blank lines, safe to include."""
    guessed = "".join(f"<p>Guessed: {escape(note)}.</p>" for note in plan.notes)
    word = (plan.verdict or "").replace(" ", "-")
    return (f'<p class="verdict verdict-{word}"><strong>{escape(verdict(plan))}</strong></p>'
            f"<p>{escape(plan.model.name)}, {plan.model.parameters:,} parameters: "
            f"{escape(describe(plan.model, plan.job))}.</p>{guessed}"
            + _three(plan) + _timeline(plan) + _components(plan)
            + f"<p>In a terminal: <code>{escape(command(query))}</code></p>").replace("\n", " ")


def advice_html(plan, query):
    """What would make it fit, each with a link to the set-up it makes."""
    if plan.verdict in (None, "fits"):
        return ""
    items = "".join(f"<li>{_change(change, query)}</li>" for change in plan.advice)
    found = (f"<ol>{items}</ol>" if items else
             "<p>Nothing that the planner knows makes this fit.</p>")
    return ("<p>What would make it fit, cheapest first. Each was planned again.</p>"
            + found).replace("\n", " ")


def _change(change, query):
    new = dict(parse_qsl(query, keep_blank_values=True))
    new |= {name: str(int(value)) if isinstance(value, bool) else str(value)
            for name, value in change.options}
    return (f'<a href="#{escape(urlencode(new))}">{escape(change.what)}</a>: '
            f"{size(change.plan.allocated)}, {escape(change.plan.verdict)}; "
            f"{escape(change.cost)}")


# --- the form ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Field:
    """One input. ``choices`` are (value, label) pairs; ``known`` are suggestions."""
    name: str
    label: str
    choices: tuple = ()
    known: tuple = ()
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Inputs that belong together, for some methods; folded unless ``open``."""
    title: str
    inputs: tuple
    methods: tuple = METHODS
    open: bool = False


def _choices(values, **labels):
    return tuple((str(v), labels.get(str(v).replace("-", "_"), str(v))) for v in values)


_METHODS = {"full": "train all weights", "lora": "LoRA", "qlora": "QLoRA: LoRA over 4-bit weights",
            "inference": "inference"}
_OPTIMIZERS = {"adamw": "AdamW (PyTorch's default, foreach)", "adamw_fused": "AdamW, fused",
               "adamw_8bit": "AdamW, 8-bit", "sgd": "SGD", "sgd_momentum": "SGD with momentum",
               "adafactor": "Adafactor"}


def groups():
    """The form's parts, in order. Every field of Job is in exactly one."""
    return (
        Group("What runs, and where", (
            Field("model", "Model", known=tuple(registry()),
                  note="a name, or a count such as 7B"),
            Field("method", "Method", _choices(METHODS, **_METHODS)),
            Field("gpu", "GPU", known=("24GiB", "48GiB", "80GiB", *GPUS),
                  note="a name, or a size such as 24GiB"),
            Field("batch", "Sequences at a time", note="on one GPU"),
            Field("sequence", "Tokens in each", note="in inference, of the prompt"),
            Field("attention", "Attention", _choices(
                ("eager", "sdpa", "flash"), eager="written out (eager)",
                sdpa="fused, PyTorch's (sdpa)", flash="FlashAttention")),
        ), open=True),
        Group("A step of training", (
            Field("recipe", "Number formats", _choices(RECIPES, **RECIPE_NAMES)),
            Field("optimizer", "Optimizer", _choices(OPTIMIZERS, **_OPTIMIZERS)),
            Field("checkpointing", "Checkpointing: keep only each layer's input"),
            Field("accumulate", "Micro-batches in a step"),
            Field("loss", "Loss", _choices(
                ("plain", "narrow", "fused", "chunked"), plain="written out, in fp32",
                narrow="written out, in the logits' own type", fused="fused",
                chunked="in chunks")),
            Field("kernels", "Norms, positions and MLP", _choices(
                ("eager", "fused"), eager="as written in Hugging Face's models",
                fused="fused kernels")),
            Field("in_backward", "Each gradient applied and freed in the backward pass"),
            Field("varied", "Sequences of all lengths up to that one"),
            Field("packing", "Packing: sequences full of documents that do not see each other"),
        ), TRAINING, open=True),
        Group("Adapters", (
            Field("rank", "Rank"),
            Field("targets", "Adapted layers", _choices(
                TARGETS, qv="queries and values", qkvo="attention", all="attention and MLP")),
            Field("adapters", "Adapters' numbers", _choices(("fp32", "bf16"))),
            Field("dropout", "Dropout of their input", note="a share, such as 0.05"),
            Field("upcast", "QLoRA: norms, embedding and head in fp32"),
            Field("single_quant", "QLoRA: scales kept in fp32, not quantized again"),
            Field("hold_inputs", "QLoRA: bitsandbytes up to 0.41, which keeps inputs"),
        ), ADAPTERS),
        Group("Generation", (
            Field("new_tokens", "New tokens after the prompt"),
            Field("weight_bits", "Bits of a weight"),
            Field("kv_bits", "Bits of a number in the cache"),
            Field("paged", "An engine that fills its share with pages"),
            Field("share", "That engine's share of the GPU"),
            Field("all_logits", "Logits of the whole prompt, not of its end"),
        ), INFERENCE, open=True),
        Group("Several GPUs, and the CPU", (
            Field("gpus", "GPUs"),
            Field("shard", "Sharded over data parallel GPUs", _choices(
                (0, 1, 2, 3), **{"0": "nothing", "1": "optimizer (ZeRO 1)",
                                 "2": "and gradients (ZeRO 2)",
                                 "3": "and weights (ZeRO 3, FSDP)"})),
            Field("flat", "FSDP1: one parameter a layer"),
            Field("no_sync", "FSDP: whole gradients until the last micro-batch"),
            Field("tensor", "Tensor parallel"),
            Field("tensor_only", "Tensor parallel without sequence parallel"),
            Field("pipeline", "Pipeline stages"),
            Field("context", "Context parallel"),
            Field("expert", "Expert parallel"),
            Field("offload", "Kept on the CPU", _choices(
                ("none", "optimizer", "parameters"), none="nothing", optimizer="optimizer",
                parameters="optimizer and weights")),
        )),
    )


def defaults():
    """{name: text} of every input as the page first shows it."""
    job = {f.name: f.default for f in fields(Job)}
    return DEFAULTS | {name: str(int(v)) if isinstance(v, bool) else str(v)
                       for name, v in job.items()}


def _input(field, default):
    """Label and control of one field."""
    id = f"plan-{field.name}"
    name = f'id="{id}" name="{field.name}"'
    if next((f.type for f in fields(Job) if f.name == field.name), None) is bool:
        return (f'<div class="check"><input type="checkbox" {name} value="1">'
                f'<label for="{id}">{escape(field.label)}</label></div>')
    label = f'<label for="{id}">{escape(field.label)}</label>'
    if field.choices:
        options = "".join(f'<option value="{v}"{" selected" * (v == default)}>{escape(text)}'
                          "</option>" for v, text in field.choices)
        return f"<div>{label}<select {name}>{options}</select></div>"
    extra = "" if field.known else ' inputmode="decimal"'
    listed = note = ""
    if field.known:
        extra = f' list="{id}-known"'
        options = "".join(f'<option value="{escape(v)}"></option>' for v in field.known)
        listed = f'<datalist id="{id}-known">{options}</datalist>'
    if field.note:
        extra += f' aria-describedby="{id}-note"'
        note = f'<small id="{id}-note">{escape(field.note)}</small>'
    return (f'<div>{label}<input type="text" autocomplete="off" spellcheck="false" {name} '
            f'value="{escape(default)}"{extra}>{listed}{note}</div>')


_CONFIG = ('<details><summary>Or a model\'s config.json</summary><div>'
           '<label for="plan-config">Its text; it then replaces the name above</label>'
           '<textarea id="plan-config" name="config" rows="6" spellcheck="false"></textarea>'
           "</div></details>")


def _group(group, start):
    inputs = "\n".join(_input(f, start[f.name]) for f in group.inputs)
    inside = f'<div class="grid">\n{inputs}\n</div>'
    if group.inputs[0].name == "model":
        inside += f"\n{_CONFIG}"
    title, methods = escape(group.title), f'data-methods="{" ".join(group.methods)}"'
    if group.open:
        return f"<fieldset {methods}><legend>{title}</legend>\n{inside}\n</fieldset>"
    return (f'<details class="fold"><summary>{title}</summary>\n'
            f'<fieldset {methods} aria-label="{title}">\n{inside}\n</fieldset>\n</details>')


def form_html(files="", version="", megabytes=0):
    """The form, hidden until its script runs.

    files: names of the Python files below _static/companion; version: of them all;
    megabytes: what the first use fetches, unpacked; to the byte, for the page waits for the last.
    """
    start = defaults()
    parts = "\n".join(_group(g, start) for g in groups())
    return (
        '<p class="planner-off">The form needs JavaScript and an address that begins with '
        "http. In a copy of the book, <code>make serve</code> gives one; "
        "<code>companion plan</code> answers in a terminal without either.</p>\n"
        f'<form class="planner" novalidate hidden data-files="{escape(files)}" '
        f'data-version="{version}" data-megabytes="{megabytes:.6f}">\n{parts}\n'
        '<p class="go"><button type="submit">Plan</button> '
        '<button type="button" class="save">Save as JSON</button> '
        '<a class="link" href="#">Address of this set-up</a></p>\n'
        '<p class="alert" role="alert"></p>\n'
        '<p class="says"><span role="status"></span> <progress max="1" value="0" '
        'aria-label="Python fetched" hidden></progress></p>\n'
        '<div class="answer" role="region" aria-label="Answer"></div>\n'
        '<div class="advice" role="region" aria-label="What would make it fit"></div>\n'
        "</form>\n"
        f'<script type="module" src="_static/planner.mjs?v={version}"></script>')


# --- worked examples --------------------------------------------------------------------------

EXAMPLES = (
    ("All weights, pure bf16, AdamW", "method=full",
     "The crash that opens the book. The weights fit, and the step does not: gradients, both "
     "moments and what the optimizer makes on the way are each as large as they are. No batch "
     "and no length changes that."),
    ("LoRA", "method=lora",
     "Gradients and moments are gone but for the adapters. What the layers save for the "
     "backward pass is not."),
    ("LoRA with checkpointing", "method=lora&checkpointing=1",
     "Each layer's input is kept, and one layer's tensors at a time."),
    ("QLoRA with checkpointing", "method=qlora&checkpointing=1",
     "The weights of the layers take four bits and their scales."),
    ("Inference, 8 sequences", "method=inference&batch=8&new_tokens=512",
     "Keys and values of 8 sequences of 2,560 tokens are nearly as large as the weights."),
)


def examples_html():
    """A table of the examples, then each answer, folded."""
    rows, answers = "", ""
    for number, (title, query, why) in enumerate(EXAMPLES, 1):
        plan = make_plan(*read(query))
        rows += (f'<tr><th scope="row"><a href="#example-{number}">{escape(title)}</a></th>'
                 f'<td class="size" data-of="allocated">{size(plan.allocated)}</td>'
                 f'<td class="size" data-of="on the device">{size(plan.on_device[0])} to '
                 f"{size(plan.on_device[1])}</td>"
                 f"<td>{escape(plan.verdict)}</td></tr>\n")
        answers += (f'<details class="example"><summary>{escape(title)}</summary>\n'
                    f'<p id="example-{number}">{escape(why)}</p>\n{answer_html(plan, query)}\n'
                    f"{advice_html(plan, query)}"
                    f'<p><a class="change" href="#{escape(query)}">Change this set-up</a></p>\n'
                    "</details>\n")
    caption = ("A model of 7 billion parameters (Llama-2-7B) on a GPU of 24 GiB, sequences of "
               "2,048 tokens, one at a time unless said.")
    head = ("Set-up", "Allocated", "On the device", "Verdict")
    return f'{_table(caption, head, rows)}\n{answers}'
