// The page: numbers, search, buckets, and what the parts tell each other.
const MATCHES = 60, ROWS = 200;

function start(data) {
  data.graphs.forEach((graph, index) => Object.assign(graph, graph.timeline, { index }));
  const timed = data.graphs.filter((graph) => graph.timeline);
  for (const graph of timed) graph.positions = new Map(graph.names.map((name, node) => [name, node]));

  const tooltip = document.getElementById("tooltip");
  const hover = (found, event) => {
    tooltip.hidden = found === null;
    if (found === null) return;
    tooltip.textContent = found.text();
    tooltip.style.left = `${Math.min(event.clientX + 14, innerWidth - tooltip.offsetWidth - 8)}px`;
    tooltip.style.top = `${Math.min(event.clientY + 14, innerHeight - tooltip.offsetHeight - 8)}px`;
  };
  const stages = new Stages(data.graphs, timed.length ? timed[0].index : data.graphs.length - 1);
  const timeline = new Timeline(document.getElementById("timeline"), timed, hover, (found) => stages.showNode(found.graph, found.node));
  document.addEventListener("click", ({ target }) => {
    const row = target.closest("[data-node]");
    if (!row) return;
    const graph = data.graphs[row.dataset.graph], node = +row.dataset.node;
    timeline.showNode(graph, node);
    if (!row.closest("#code")) stages.showNode(graph, node);
  });
  for (const [id, act] of [["zoom-in", () => timeline.zoom(0.5)], ["zoom-out", () => timeline.zoom(2)], ["zoom-all", () => timeline.show(0, timeline.end)]])
    document.getElementById(id).addEventListener("click", act);
  numbers(data, timed);
  legend(timeline);
  peaks(timed);
  buckets(timed);
  search(data.lives, timed, [timeline, stages]);
}

function numbers(data, timed) {
  if (!timed.length) return;
  const time = (key) => formatTime(timed.reduce((total, graph) => total + graph[key], 0) * 1e6);
  const peak = Math.max(...timed.map((graph) => graph.memory?.peak ?? 0));
  const parts = [
    ["predicted on", timed[0].hardware], ["step without optimizer", time("seconds")], ["compute", time("compute")],
    ["exposed communication", time("exposed")], ["peak", formatBytes(peak)], ["buckets", data.buckets],
  ];
  document.getElementById("numbers").append(...parts.flatMap(([name, value], n) => [`${n ? " · " : ""}${name} `, element("b", value)]));
}

function legend(timeline) {
  for (const [name, color] of [["compute waits", "var(--exposed)"], ...timeline.categories])
    document.getElementById("legend").append(element("i", "", { style: `background: ${color}` }), name);
}

function peaks(timed) {
  for (const graph of timed.filter(({ memory }) => memory)) {
    const { peak, peak_position, holders } = graph.memory;
    const card = element("div", "", { class: "card" }), table = element("table");
    table.append(...holders.map(([node, category, nbytes]) => tableRow([node, category, formatBytes(nbytes)], 2, graph, graph.positions.get(node))));
    card.append(element("h2", `${graph.phase}: ${formatBytes(peak)} at ${graph.names[peak_position]}`), table);
    document.getElementById("peaks").append(card);
  }
}

function buckets(timed) {
  const table = document.getElementById("buckets");
  const header = ["graph", "bucket", "kind", "parameters", "bytes", "start", "wait", "first use", "free", "ahead", "takes", "exposed"];
  table.tHead.append(tableRow(header, 3, null, undefined, "th"));
  const time = (seconds) => (seconds === null ? null : formatTime(seconds * 1e6));
  const rows = timed.flatMap((graph) => graph.buckets.map((bucket) => [graph, bucket]));
  const made = ([graph, b]) => {
    const cells = [graph.phase, b.name, b.kind, b.parameters.length, formatBytes(b.nbytes), b.start, b.wait, b.first_use, b.escapes ? "kept" : b.free, b.ahead, time(b.seconds), time(b.exposed)];
    const row = tableRow(cells, 3, graph, b.start ?? b.wait ?? b.first_use ?? undefined);
    if (b.exposed) row.lastChild.classList.add("exposed");
    return row;
  };
  // A deep model has thousands of rows: those further down are made when somebody scrolls there.
  const box = table.parentElement;
  const more = () => {
    if (box.scrollTop + 2 * box.clientHeight >= box.scrollHeight) table.tBodies[0].append(...rows.splice(0, ROWS).map(made));
  };
  box.addEventListener("scroll", more);
  more();
}

// `parts`: those that mark the nodes of the parameter that is looked at.
function search(lives, timed, parts) {
  const field = document.getElementById("search"), list = document.getElementById("matches"), card = document.getElementById("parameter");
  const named = () => {
    const wanted = field.value.trim().toLowerCase();
    return Object.keys(lives).filter((name) => name.toLowerCase().includes(wanted)).sort((a, b) => (b.toLowerCase() === wanted) - (a.toLowerCase() === wanted));
  };
  const mark = (marked) => {
    card.hidden = !marked;
    for (const part of parts) {
      part.marked = marked;
      part.draw();
    }
  };
  const choose = (name) => {
    field.value = name;
    const [about, events] = lives[name], table = element("table"), body = element("div", "", { class: "card" });
    const found = events.map(([phase, ...event]) => [timed.find((graph) => graph.phase === phase), ...event]);
    table.append(...found.map(([graph, node, kind, line]) => tableRow([graph.phase, kind, graph.names[node], line], 4, graph, node)));
    body.append(element("h2", about), table);
    card.replaceChildren(body);
    mark(new Set(found.map(([graph, node]) => `${graph.index}:${node}`)));
  };

  field.addEventListener("input", () => {
    const found = named();
    list.replaceChildren(...found.slice(0, MATCHES).map((name) => element("option", "", { value: name })));
    if (found.length > MATCHES) list.append(element("option", "", { value: field.value, label: `… ${found.length - MATCHES} more` }));
    field.setCustomValidity(found.length ? "" : "no parameter of this name");
    field.reportValidity();
    if (!field.value.trim()) mark(null);
    else if (field.value in lives) choose(field.value); // as one that was picked from the list
  });
  field.addEventListener("keydown", (event) => {
    const [first] = named();
    if (event.key === "Enter" && first) choose(first);
    if (event.key === "Escape") { field.value = ""; mark(null); }
  });
}

readData().then(start);
