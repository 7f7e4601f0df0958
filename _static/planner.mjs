// The planner's page: its form, its address, and the worker that runs Python.
// Nothing is fetched before the first plan. Python judges every input; this only carries text.
const form = document.querySelector("form.planner");
const at = (name) => form.querySelector(`.${name}`);
const { files, version, megabytes } = form.dataset;
const controls = [...form.elements].filter((e) => e.name);
const status = at("says").querySelector("span"), progress = form.querySelector("progress");

// --- the worker ---

class Stopped extends Error {}
let worker, ready = false, waiting = new Map(), count = 0;

function startWorker() {
  const script = new URL(`planner_worker.mjs?v=${version}`, import.meta.url);
  worker = new Worker(script, { type: "module" });
  worker.onerror = (event) => stop(new Error(event.message ?? "Python could not be fetched"));
  worker.onmessage = ({ data }) => {
    if (data.bytes) return showProgress(data.bytes / 1e6);
    if (data.ready) return beReady();
    const { resolve, reject } = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.failed === undefined) return resolve(data.text);
    reject(new Error(ready ? `The planner failed: ${data.failed}` : data.failed));
    stop();  // what failed may go well at the next try
  };
}

function stop(reason = new Stopped()) {
  worker?.terminate();
  worker = undefined;
  ready = false;
  progress.hidden = true;
  for (const { reject } of waiting.values()) reject(reason);
  waiting.clear();
}

/** The text that a function of companion/planner_page.py returns for a set-up. */
export function ask(call, query) {
  if (!worker) startWorker();
  return new Promise((resolve, reject) => {
    waiting.set(++count, { resolve, reject });
    worker.postMessage({ id: count, call, query, files: files.split(" "), version });
  });
}

function showProgress(now) {
  const done = now >= megabytes;
  progress.hidden = done;
  progress.value = now / megabytes;
  if (done) say("Starting Python…");
}

function beReady() {
  ready = true;
  progress.hidden = true;
}

// --- the set-up and the address ---

const start = (c) => c.type === "checkbox" ? "" :
  c.options ? [...c.options].find((o) => o.defaultSelected).value : c.defaultValue;
const value = (c) => c.type === "checkbox" ? (c.checked ? "1" : "") : c.value;
const used = (c) => !c.closest("fieldset").disabled;

/** The set-up as an address: what differs from the start. */
export function query() {
  const changed = controls.filter((c) => used(c) && value(c) !== start(c));
  return new URLSearchParams(changed.map((c) => [c.name, value(c)])).toString();
}

function writeAddress() {
  const address = `#${query()}`;
  at("link").href = address;
  if (address !== "#" || isSetUp()) history.replaceState(null, "", address);
}

/** Fill the form from an address; what it does not name goes back to its start. */
function fill(text) {
  const given = new URLSearchParams(text), odd = new Set(given.keys());
  for (const c of controls) {
    const v = given.get(c.name) ?? start(c);
    if (c.type === "checkbox") c.checked = v === "1";
    else c.value = v;
    if (c.options && c.selectedIndex < 0) c.value = start(c);  // none of its choices
    else odd.delete(c.name);
  }
  fitMethod();
  for (const details of form.querySelectorAll("details"))
    details.open ||= [...details.querySelectorAll("[name]")].some((c) => value(c) !== start(c));
  writeAddress();
  const line = `The address holds what the form does not know: ${[...odd].join(", ")}`;
  complain(odd.size ? new Error(line) : null);
}

/** Only what the method knows is shown and sent; what was typed elsewhere stays. */
function fitMethod() {
  for (const set of form.querySelectorAll("fieldset")) {
    set.disabled = !set.dataset.methods.split(" ").includes(form.elements.method.value);
    (set.closest(".fold") ?? set).hidden = set.disabled;
  }
}

// --- planning ---

const PATIENCE = 2000;  // ms; to start Python anew takes about as long
let running = false, again = false, answered = false, timer, patience;

/** Plan the newest set-up; a search for an older one that takes too long is given up. */
async function plan() {
  again = true;
  clearTimeout(patience);
  if (waiting.size) patience = setTimeout(giveUp, PATIENCE);
  if (running) return;
  running = true;
  while (again) {
    again = false;
    await once(query()).catch(complain);
    clearTimeout(patience);
  }
  running = false;
}

function giveUp() {
  if (!ready) return;
  again = running;
  stop();
}

async function once(text) {
  say(ready ? "Planning…" : "Fetching Python…");
  const found = JSON.parse(await ask("answer", text));
  if (again) return;
  if (found.error) return complain(new Error(found.error));
  answered = true;
  complain(null);
  at("answer").innerHTML = found.html;
  at("advice").replaceChildren();
  say(found.verdict, true);
  if (found.advise) await advise(text, found.verdict);
}

async function advise(text, verdict) {
  say("Looking for what would make it fit…");
  const found = JSON.parse(await ask("advice", text));
  if (again) return;
  at("advice").innerHTML = found.html;
  say(`${verdict} What would make it fit is listed.`, true);
}

async function save() {
  try {
    say(ready ? "Planning…" : "Fetching Python…");
    const text = await ask("as_json", query());
    const { error } = JSON.parse(text);
    if (error) return complain(new Error(error));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    say("Saved.");
  } catch (error) { complain(error); }
}

/** One line on what goes on; quiet: for screen readers, where the page shows it anyway. */
function say(text, quiet = false) {
  status.textContent = text;
  status.classList.toggle("quiet", quiet);
}

/** One line for a mistake, the input it names marked; nothing typed and no answer is lost. */
function complain(error) {
  if (error instanceof Stopped) return;
  const line = error ? error.message : "";
  const kept = line && answered ? " The answer below is to the set-up before." : "";
  at("alert").textContent = line && line.replace(/[^.?!]$/, "$&.") + kept;
  at("answer").classList.toggle("old", Boolean(kept));
  at("advice").classList.toggle("old", Boolean(kept));
  for (const c of controls) {
    const wrong = line.startsWith(`${c.name} `) || line.startsWith(`${c.name}:`);
    wrong ? c.setAttribute("aria-invalid", "true") : c.removeAttribute("aria-invalid");
  }
  if (error) say("");
}

// --- events ---

const isSetUp = () => location.hash.includes("=");  // else it is a place in the page

/** Wait for the end of the typing: browsers limit how often an address may change. */
function changed() {
  fitMethod();
  clearTimeout(timer);
  timer = setTimeout(settled, 400);
}

function settled() {
  writeAddress();
  return worker && plan();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  writeAddress();
  plan();
});
form.addEventListener("input", changed);
at("save").addEventListener("click", save);
window.addEventListener("hashchange", () => {
  if (!isSetUp()) return;
  fill(location.hash.slice(1));
  if (worker) plan();
  form.scrollIntoView();
  form.querySelector("[type=submit]").focus({ preventScroll: true });
});

document.querySelector(".planner-off").hidden = true;
form.hidden = false;
fill(isSetUp() ? location.hash.slice(1) : "");
