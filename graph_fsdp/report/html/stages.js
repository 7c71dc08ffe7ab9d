// The graphs after each pass: texts are rebuilt from their differences, and only lines in sight are in the page.
const LINE = 18, CONTEXT = 2;

// How a stage is made of the lines before it: [kind, line] from top to bottom, kind "", "removed" or "added".
function* difference(before, stage) {
  let old = 0;
  for (const change of stage.changes) {
    const [kind, count, added] = Array.isArray(change) ? ["removed", ...change] : ["", change, []];
    for (const end = old + count; old < end; old++) yield [kind, before[old]];
    for (const line of added) yield ["added", line];
  }
}

class Stages {
  constructor(graphs, first) {
    this.lines = [];
    this.marked = null; // "graph:node" → true while a parameter is looked at
    this.box = document.getElementById("code");
    this.pre = document.getElementById("code-lines");
    this.tabs = document.getElementById("stages");
    this.select = document.getElementById("graph");
    this.only = document.getElementById("only-changes");
    graphs.forEach((graph) => this.select.append(element("option", graph.title, { value: graph.index })));
    this.select.addEventListener("change", () => this.open(graphs[this.select.value]));
    this.only.addEventListener("change", () => this.openStage(this.stage));
    this.box.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
    if (graphs.length) this.open(graphs[first]);
  }

  open(graph) {
    this.graph = graph;
    this.select.value = graph.index;
    this.texts = [];
    for (const stage of graph.stages)
      this.texts.push([...difference(this.texts.at(-1) ?? [], stage)].filter(([kind]) => kind !== "removed").map(([, line]) => line));
    this.tabs.replaceChildren(...graph.stages.map((stage, n) => {
      const tab = element("button", stage.name, { role: "tab", "aria-selected": "false" });
      tab.addEventListener("click", () => this.openStage(n));
      return tab;
    }));
    this.openStage(Math.max(0, graph.stages.findLastIndex((stage) => stage.changes.some(Array.isArray))));
  }

  openStage(number) {
    this.stage = number;
    const stage = this.graph.stages[number];
    [...this.tabs.children].forEach((tab, n) => tab.setAttribute("aria-selected", String(n === number)));
    document.getElementById("stage-summary").textContent = stage.header.replace(/^# /gm, "").split("\n").join("; ");
    this.lines = number ? this.compared([...difference(this.texts[number - 1], stage)]) : this.texts[0].map((text) => ["", text]);
    if (number && this.only.checked && this.lines.some(([kind]) => kind)) this.lines = this.withoutSame(this.lines);
    document.getElementById("code-height").style.height = `${this.lines.length * LINE + 8}px`;
    this.box.scrollTop = 0;
    this.draw();
  }

  // A line that is removed in one place and added in another has moved, and stands where it was added.
  compared(lines) {
    const linesOf = (wanted) => new Set(lines.filter(([kind]) => kind === wanted).map(([, line]) => line));
    const removed = linesOf("removed"), added = linesOf("added");
    return lines
      .filter(([kind, line]) => kind !== "removed" || !added.has(line))
      .map(([kind, line]) => [kind === "added" && removed.has(line) ? "moved" : kind, line]);
  }

  withoutSame(lines) {
    const near = new Uint8Array(lines.length);
    lines.forEach(([kind], n) => { if (kind) near.fill(1, Math.max(0, n - CONTEXT), n + CONTEXT + 1); });
    return lines.flatMap((line, n) => {
      if (near[n]) return [line];
      if (near[n - 1] === 0) return []; // the first line of the gap tells its length
      const end = near.indexOf(1, n);
      return [["gap", `    … ${(end < 0 ? lines.length : end) - n} lines`]];
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - 10);
    const last = Math.min(this.lines.length, first + Math.ceil(this.box.clientHeight / LINE) + 20);
    this.pre.style.top = `${first * LINE}px`;
    this.pre.replaceChildren(...this.lines.slice(first, last).map(([kind, text]) => {
      const line = element("div", `${{ added: "+", removed: "-", moved: "~" }[kind] ?? " "} ${text}`, kind ? { class: kind } : {});
      const node = this.graph.positions?.get(/^\s+(\w+) = /.exec(text)?.[1]);
      if (node === undefined) return line;
      Object.assign(line.dataset, { graph: this.graph.index, node });
      line.classList.toggle("found", !!this.marked?.has(`${this.graph.index}:${node}`));
      return line;
    }));
  }

  showNode(graph, node) {
    if (graph !== this.graph) this.open(graph);
    const find = () => this.lines.findIndex(([, text]) => text.trimStart().startsWith(`${graph.names[node]} = `));
    if (find() < 0 && this.only.checked) {
      this.only.checked = false;
      this.openStage(this.stage);
    }
    const at = find();
    if (at >= 0) this.box.scrollTop = Math.max(0, at * LINE - this.box.clientHeight / 2);
    this.draw();
  }
}
