// What the page knows: read once from the deflated JSON.
async function readData() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const formatBytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(n) >= 1000 && unit < units.length - 1) { n /= 1000; unit++; }
  return `${unit ? n.toFixed(n < 10 ? 2 : 1) : n} ${units[unit]}`;
};

// `step`: what tells two times apart that stand side by side, in µs.
const formatTime = (us, step = Infinity) => {
  const [scale, unit] = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = us >= 1e6 ? 3 : us >= 1e3 ? (us < 1e4 ? 3 : 1) : us < 10 ? 2 : 1;
  const needed = Math.min(8, Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9)));
  return `${(us / scale).toFixed(Number.isFinite(needed) ? Math.max(digits, needed) : digits)} ${unit}`;
};

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The first cells are text. A row of a node, where there is one, leads to it: the page listens for clicks on all of them.
function tableRow(cells, textCells, graph, node, tag = "td") {
  const row = element("tr", "", node === undefined ? {} : { "data-graph": graph.index, "data-node": node });
  row.append(...cells.map((cell, n) => element(tag, cell ?? "-", n < textCells ? { class: "text" } : {})));
  return row;
}
