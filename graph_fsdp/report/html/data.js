// What the page knows: read once from the deflated JSON.
async function readData() {
  const packed = atob(document.getElementById("data").textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let n = 0; n < packed.length; n++) bytes[n] = packed.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = JSON.parse(await new Response(stream).text());
  if (data.format !== 2) throw new Error(`the data has format ${data.format}, this page reads 2`);
  return data;
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

function tableRow(cells, tag, textCells) {
  const row = document.createElement("tr");
  cells.forEach((cell, n) => row.append(element(tag, cell ?? "-", n < textCells ? { class: "text" } : {})));
  return row;
}

// A row that leads to a node, where there is one of this name.
function nodeRow(cells, textCells, name, show) {
  const row = tableRow(cells, "td", textCells);
  if (name === undefined) return row;
  row.dataset.node = name;
  row.addEventListener("click", show);
  return row;
}

// Everything about one node, as lines of text.
function describeNode(data, graph, node) {
  const string = (n) => (n < 0 ? null : data.strings[n]);
  const lines = [graph.names[node], string(graph.operators[node])];
  const record = graph.records[node];
  if (record) {
    const [role, unit, bucket, nbytes, count] = record;
    lines.push(`${role} of ${bucket || unit}: ${formatBytes(nbytes)}, ${count} parameter${count === 1 ? "" : "s"}`);
  }
  const module = string(graph.modules[node]);
  if (module !== null) lines.push(`module ${module || "(the model)"}`);
  const source = string(graph.sources[node]);
  if (source !== null) lines.push(source);
  return lines.filter((line) => line !== null);
}
