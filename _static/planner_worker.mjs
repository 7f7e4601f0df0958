// Runs the book's own Python files, away from the page, so that it stays usable meanwhile.
//   in:  {id, call, query, files, version}      out: {id, text | failed} and {bytes | ready}
const here = new URL(".", import.meta.url);
let module, fetched = 0, missing;

/** As fetch, and says how many bytes have come so far. Pyodide's own requests pass here too. */
self.fetch = (address) => new Promise((resolve, reject) => {
  const url = new URL(address.url ?? address), request = new XMLHttpRequest();
  let before = 0;
  const count = (bytes) => {
    fetched += bytes - before;
    before = bytes;
    postMessage({ bytes: fetched });
  };
  const fail = () => reject(missing = new Error(`${url.pathname} could not be fetched`));
  request.open("GET", url);
  request.responseType = "arraybuffer";
  request.onprogress = (event) => count(event.loaded);
  request.onerror = fail;
  request.onload = () => {
    if (request.status !== 200) return fail();
    count(request.response.byteLength);
    const type = request.getResponseHeader("Content-Type") ?? "";
    resolve(new Response(request.response, { headers: { "Content-Type": type } }));
  };
  request.send();
});

async function source(name, version) {
  const response = await self.fetch(new URL(`companion/${name}?v=${version}`, here));
  return [name, new Uint8Array(await response.arrayBuffer())];
}

async function start({ files, version }) {
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  // Of the release in _static/pyodide; its list of packages, of which none is used, stays out.
  const lockFileContents = {
    info: { abi_version: "2026_0", arch: "wasm32", platform: "emscripten_5_0_3", python: "3.14.2" },
    packages: {},
  };
  const [python, ...sources] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", here).href, lockFileContents }),
    ...files.map((name) => source(name, version))]);
  const home = "/home/pyodide/companion";
  python.FS.mkdirTree(`${home}/data`);
  for (const [name, bytes] of sources) python.FS.writeFile(`${home}/${name}`, bytes);
  python.runPython("import sys; sys.path.insert(0, '/home/pyodide')");
  const page = python.pyimport("companion.planner_page");
  postMessage({ ready: true });
  return page;
}

self.onmessage = async ({ data }) => {
  try {
    const page = await (module ??= start(data));
    postMessage({ id: data.id, text: page[data.call](data.query) });
  } catch (error) {
    const lines = String((missing ?? error).message ?? error).trim().split("\n");
    postMessage({ id: data.id, failed: lines.at(-1) });
  }
};
