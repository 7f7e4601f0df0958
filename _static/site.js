// What is too wide scrolls inside itself; the keyboard must reach it too. The theme
// sees to code and outputs, this to tables and formulas.
const reachable = () => {
  for (const box of document.querySelectorAll(".pst-scrollable-table-container, mjx-container[display]")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
window.addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(reachable));
window.addEventListener("resize", reachable);

// The claims page: show only the claims that hold what is typed. Without this
// script the page shows all of them.
document.addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".claim-filter");
  if (!box) return;
  const input = box.querySelector("input"), count = box.querySelector("output");
  const items = [...document.querySelectorAll("ul.claims > li")];
  const texts = items.map((item) => item.textContent.toLowerCase());
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    items.forEach((item, i) => { item.hidden = !words.every((w) => texts[i].includes(w)); });
    count.textContent = `${items.filter((item) => !item.hidden).length} of ${items.length}`;
  };
  input.addEventListener("input", show);
  window.addEventListener("hashchange", () => {  // a link to a claim that is filtered out
    const item = document.getElementById(location.hash.slice(1));
    if (item?.hidden) { input.value = ""; show(); item.scrollIntoView(); }
  });
  box.hidden = false;
  show();
});
