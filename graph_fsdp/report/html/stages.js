// The graphs after each pass: texts are rebuilt from their differences, and only lines in sight are in the page.
const LINE = 18, CONTEXT = 2;

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

  open(number, stage = null) {
    this.graph = number;
    this.select.value = number;
    const stages = this.all[number].stages;
    this.tabs.replaceChildren(...stages.map((s, n) => {
      const tab = element("button", s.name, { role: "tab", "aria-selected": "false" });
      tab.addEventListener("click", () => this.openStage(n));
      return tab;
    }));
    const changed = stages.map((s) => s.changes.some(([kind]) => kind !== "same"));
    this.openStage(stage ?? Math.max(0, changed.lastIndexOf(true)));
  }

  texts_of(number) {
    if (!this.texts.has(number)) {
      let before = [];
      this.texts.set(number, this.all[number].stages.map((stage) => {
        const lines = [];
        let old = 0, added = 0;
        for (const [kind, count] of stage.changes) {
          if (kind === "same") for (let n = 0; n < count; n++) lines.push(before[old + n]);
          if (kind === "added") for (let n = 0; n < count; n++) lines.push(stage.added[added++]);
          if (kind !== "added") old += count;
        }
        return (before = lines);
      }));
    }
    return this.texts.get(number);
  }

  openStage(number) {
    this.stage = number;
    const stage = this.all[this.graph].stages[number], texts = this.texts_of(this.graph);
    [...this.tabs.children].forEach((tab, n) => tab.setAttribute("aria-selected", String(n === number)));
    document.getElementById("stage-summary").textContent = stage.header.replace(/^# /gm, "").split("\n").join("; ");
    this.lines = number ? this.compared(texts[number - 1], texts[number], stage.changes) : texts[0].map((text) => ["", text]);
    if (number && this.only.checked && this.lines.some(([kind]) => kind)) this.lines = this.withoutSame(this.lines);
    document.getElementById("code-height").style.height = `${this.lines.length * LINE + 8}px`;
    this.box.scrollTop = 0;
    this.draw();
  }

  // [kind, line]: kind "", "added", "removed" or "moved" (removed in one place, and added in another).
  compared(before, after, changes) {
    const removed = new Set(), added = new Set(), lines = [];
    let i = 0, j = 0;
    for (const [kind, count] of changes) {
      for (let n = 0; n < count; n++) {
        if (kind === "removed") removed.add(before[i + n]);
        if (kind === "added") added.add(after[j + n]);
      }
      if (kind !== "added") i += count;
      if (kind !== "removed") j += count;
    }
    i = j = 0;
    for (const [kind, count] of changes) {
      for (let n = 0; n < count; n++) {
        if (kind === "same") lines.push(["", after[j + n]]);
        else if (kind === "added") lines.push([removed.has(after[j + n]) ? "moved" : "added", after[j + n]]);
        else if (!added.has(before[i + n])) lines.push(["removed", before[i + n]]);
      }
      if (kind !== "added") i += count;
      if (kind !== "removed") j += count;
    }
    return lines;
  }

  withoutSame(lines) {
    const near = new Uint8Array(lines.length);
    lines.forEach(([kind], n) => { if (kind) near.fill(1, Math.max(0, n - CONTEXT), n + CONTEXT + 1); });
    const kept = [];
    let left = 0;
    lines.forEach((line, n) => {
      if (near[n]) { if (left) kept.push(["gap", `    … ${left} lines`]); left = 0; kept.push(line); } else left++;
    });
    if (left) kept.push(["gap", `    … ${left} lines`]);
    return kept;
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
    let at = this.lines.findIndex(([, text]) => text.trimStart().startsWith(`${name} = `));
    if (at < 0 && this.only.checked) {
      this.only.checked = false;
      this.openStage(this.stage);
      at = this.lines.findIndex(([, text]) => text.trimStart().startsWith(`${name} = `));
    }
    if (at >= 0) this.box.scrollTop = Math.max(0, at * LINE - this.box.clientHeight / 2);
    this.draw();
  }
}
