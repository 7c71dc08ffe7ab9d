// The page: numbers, search, buckets, and what the parts tell each other.
const MATCHES = 60, ROWS = 200;

function start(data) {
  const tooltip = document.getElementById("tooltip");
  const graphOf = (phase) => data.graphs.findIndex((graph) => graph.phase === phase);

  const hover = (found, event) => {
    tooltip.hidden = found === null;
    if (found === null) return;
    const graph = data.graphs[found.graph];
    tooltip.textContent = found.slice ? sliceText(graph, found.slice) : memoryText(graph, found.memory);
    tooltip.style.left = `${Math.min(event.clientX + 14, innerWidth - tooltip.offsetWidth - 8)}px`;
    tooltip.style.top = `${Math.min(event.clientY + 14, innerHeight - tooltip.offsetHeight - 8)}px`;
  };
  const sliceText = (graph, [, node, begin, duration, exposed]) => {
    const time = `${formatTime(duration)} from ${formatTime(begin)}, ${graph.phase}`;
    const lines = describeNode(data, graph, node);
    return [lines[0], exposed ? `compute waits: ${time}` : time, ...lines.slice(1)].join("\n");
  };
  const memoryText = (graph, index) => {
    const { categories, values, positions } = graph.memory, held = values[index];
    const parts = categories.map((name, k) => [held[k], name]).filter(([n]) => n).sort((a, b) => b[0] - a[0]);
    const total = held.reduce((a, b) => a + b, 0);
    return [`${formatBytes(total)} at ${graph.names[positions[index]]}`, ...parts.map(([n, name]) => `${formatBytes(n).padStart(10)}  ${name}`)].join("\n");
  };

  const stages = new Stages(data, (graph, name) => {
    const g = data.graphs.indexOf(graph);
    const node = g < 0 ? -1 : graph.names.indexOf(name);
    if (node >= 0) timeline.showNode(g, node);
  });
  const timeline = new Timeline(document.getElementById("timeline"), data, hover, (found) => {
    if (found && found.slice) stages.showNode(data.graphs[found.graph].phase, data.graphs[found.graph].names[found.node]);
  });
  const showNode = (g, node) => {
    timeline.showNode(g, node);
    stages.showNode(data.graphs[g].phase, data.graphs[g].names[node]);
  };

  for (const [id, act] of [["zoom-in", () => timeline.zoom(0.5)], ["zoom-out", () => timeline.zoom(2)], ["zoom-all", () => timeline.show(0, timeline.end)]])
    document.getElementById(id).addEventListener("click", act);
  numbers(data);
  legend(timeline);
  peaks(data, showNode);
  buckets(data, showNode);
  search(data, timeline, stages, graphOf, showNode);
}

function numbers(data) {
  if (!data.graphs.length) return;
  const sum = (key) => data.graphs.reduce((total, graph) => total + graph[key], 0) * 1e6;
  const peak = Math.max(...data.graphs.map((graph) => (graph.memory ? graph.memory.peak : 0)));
  const parts = [
    ["predicted on", data.hardware], ["step without optimizer", formatTime(sum("seconds"))], ["compute", formatTime(sum("compute_seconds"))],
    ["exposed communication", formatTime(sum("exposed_seconds"))], ["peak", formatBytes(peak)], ["buckets", data.buckets],
  ];
  document.getElementById("numbers").append(...parts.flatMap(([name, value], n) => [`${n ? " · " : ""}${name} `, element("b", value)]));
}

function legend(timeline) {
  const target = document.getElementById("legend");
  const entry = (color, name) => { const mark = element("i"); mark.style.background = color; target.append(mark, name); };
  entry("var(--exposed)", "compute waits");
  timeline.categories.forEach(([name, color]) => entry(color, name));
}

function peaks(data, showNode) {
  const target = document.getElementById("peaks");
  data.graphs.forEach((graph, g) => {
    if (!graph.memory) return;
    const card = element("div", "", { class: "card" });
    const { peak, peak_position, holders } = graph.memory;
    const title = element("h2", `${graph.phase}: ${formatBytes(peak)} at ${graph.names[peak_position]}`);
    const table = element("table");
    for (const [node, category, nbytes] of holders) {
      const index = graph.names.indexOf(node);
      table.append(nodeRow([node, category, formatBytes(nbytes)], 2, graph.names[index], () => showNode(g, index)));
    }
    card.append(title, table);
    target.append(card);
  });
}

function buckets(data, showNode) {
  const table = document.getElementById("buckets");
  const header = ["graph", "bucket", "kind", "parameters", "bytes", "start", "wait", "first use", "free", "ahead", "takes", "exposed"];
  table.tHead.append(tableRow(header, "th", 3));
  const time = (seconds) => (seconds === null ? null : formatTime(seconds * 1e6));
  const rows = data.graphs.flatMap((graph, g) => graph.rows.map((row) => [graph, g, row]));
  const made = ([graph, g, [name, kind, count, nbytes, begin, wait, use, free, ahead, seconds, exposed]]) => {
    const cells = [graph.phase, name, kind, count, formatBytes(nbytes), begin, wait, use, free, ahead, time(seconds), time(exposed)];
    const node = begin ?? wait ?? use, row = nodeRow(cells, 3, graph.names[node], () => showNode(g, node));
    if (exposed) row.lastChild.classList.add("exposed");
    return row;
  };
  // A deep model has thousands of rows: those further down are made when somebody scrolls there.
  const box = table.parentElement;
  let shown = 0;
  const more = () => {
    if (shown < rows.length && box.scrollTop + 2 * box.clientHeight >= box.scrollHeight) {
      table.tBodies[0].append(...rows.slice(shown, shown + ROWS).map(made));
      shown += ROWS;
    }
  };
  box.addEventListener("scroll", more);
  more();
}

function search(data, timeline, stages, graphOf, showNode) {
  const field = document.getElementById("search"), list = document.getElementById("matches"), card = document.getElementById("parameter");
  const names = Object.keys(data.lives);

  const choose = (name) => {
    field.value = name;
    list.hidden = true;
    const [about, events] = data.lives[name];
    timeline.marked = new Set(events.map(([phase, node]) => `${graphOf(phase)}:${node}`));
    stages.highlighted = new Set(events.map(([phase, node]) => `${phase}:${data.graphs[graphOf(phase)].names[node]}`));
    const table = element("table");
    for (const [phase, node, kind] of events) {
      const graph = data.graphs[graphOf(phase)], source = graph.sources[node];
      const name = graph.names[node], line = source < 0 ? "" : data.strings[source].replace(/^.*[\\/]/, "");
      table.append(nodeRow([phase, data.strings[kind], name, line], 4, name, () => showNode(graphOf(phase), node)));
    }
    const body = element("div", "", { class: "card" });
    body.append(element("h2", about), table);
    card.replaceChildren(body);
    card.hidden = false;
    timeline.draw();
    stages.draw();
  };
  const clear = () => {
    timeline.marked = stages.highlighted = null;
    card.hidden = list.hidden = true;
    timeline.draw();
    stages.draw();
  };

  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    if (!wanted) return clear();
    const found = names.filter((name) => name.toLowerCase().includes(wanted));
    list.replaceChildren(...found.slice(0, MATCHES).map((name) => {
      const item = element("li", name);
      item.addEventListener("mousedown", () => choose(name));
      return item;
    }));
    if (found.length > MATCHES) list.append(element("li", `… ${found.length - MATCHES} more`, { class: "gap" }));
    if (!found.length) list.append(element("li", "no parameter of this name", { class: "gap" }));
    list.hidden = false;
  });
  field.addEventListener("keydown", (event) => {
    const wanted = field.value.trim().toLowerCase();
    const first = names.find((name) => name.toLowerCase() === wanted) ?? names.find((name) => name.toLowerCase().includes(wanted));
    if (event.key === "Enter" && first) choose(first);
    if (event.key === "Escape") { field.value = ""; clear(); }
  });
  field.addEventListener("blur", () => { list.hidden = true; });
}

readData().then(start);
