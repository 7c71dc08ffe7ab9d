// The graphs after each pass: texts are rebuilt from their differences, and only lines in sight are in the page.
const LINE = 18, CONTEXT = 2;

// How a stage is made of the lines before it: [kind, line] from top to bottom, kind "", "removed" or "added".
function* difference(before, stage) {
  let old = 0, added = 0;
  for (const [kind, count] of stage.changes)
    for (let n = 0; n < count; n++) yield [kind === "same" ? "" : kind, kind === "added" ? stage.added[added++] : before[old++]];
}

class Stages {
  constructor(data, onLine) {
    this.all = [...data.sources, ...data.graphs];
    this.onLine = onLine;
    this.texts = new Map(); // graph → [lines of each stage]
    this.highlighted = null; // names of nodes
    this.box = document.getElementById("code");
    this.pre = document.getElementById("code-lines");
    this.tabs = document.getElementById("stages");
    this.select = document.getElementById("graph");
    this.only = document.getElementById("only-changes");
    this.all.forEach((graph, n) => this.select.append(element("option", graph.title, { value: n })));
    this.select.addEventListener("change", () => this.open(+this.select.value));
    this.only.addEventListener("change", () => this.openStage(this.stage));
    this.box.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
    if (this.all.length) this.open(data.graphs.length ? data.sources.length : this.all.length - 1);
  }

  open(number) {
    this.graph = number;
    this.select.value = number;
    const stages = this.all[number].stages;
    this.tabs.replaceChildren(...stages.map((s, n) => {
      const tab = element("button", s.name, { role: "tab", "aria-selected": "false" });
      tab.addEventListener("click", () => this.openStage(n));
      return tab;
    }));
    const changed = stages.map((s) => s.changes.some(([kind]) => kind !== "same"));
    this.openStage(Math.max(0, changed.lastIndexOf(true)));
  }

  textsOf(number) {
    if (!this.texts.has(number)) {
      let before = [];
      this.texts.set(number, this.all[number].stages.map((stage) => {
        before = [...difference(before, stage)].filter(([kind]) => kind !== "removed").map(([, line]) => line);
        return before;
      }));
    }
    return this.texts.get(number);
  }

  openStage(number) {
    this.stage = number;
    const stage = this.all[this.graph].stages[number], texts = this.textsOf(this.graph);
    [...this.tabs.children].forEach((tab, n) => tab.setAttribute("aria-selected", String(n === number)));
    document.getElementById("stage-summary").textContent = stage.header.replace(/^# /gm, "").split("\n").join("; ");
    this.lines = number ? this.compared([...difference(texts[number - 1], stage)]) : texts[0].map((text) => ["", text]);
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
      const name = /^\s+(\w+) = /.exec(text);
      if (name) {
        line.dataset.node = name[1];
        line.addEventListener("click", () => this.onLine(this.all[this.graph], name[1]));
        if (this.highlighted && this.highlighted.has(`${this.all[this.graph].phase}:${name[1]}`)) line.classList.add("found");
      }
      return line;
    }));
  }

  showNode(phase, name) {
    const number = this.all.findLastIndex((graph) => graph.phase === phase); // the timeline's graphs are the last
    if (number < 0) return;
    if (number !== this.graph) this.open(number);
    const find = () => this.lines.findIndex(([, text]) => text.trimStart().startsWith(`${name} = `));
    if (find() < 0 && this.only.checked) {
      this.only.checked = false;
      this.openStage(this.stage);
    }
    const at = find();
    if (at >= 0) this.box.scrollTop = Math.max(0, at * LINE - this.box.clientHeight / 2);
    this.draw();
  }
}
