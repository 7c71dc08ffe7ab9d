// The timeline: a lane for compute, one for each lane of communication, and the bytes held below them.
const LANE = 30, GAP = 6, LABEL = 150, MEMORY = 130, AXIS = 20, PHASE = 14; // PHASE: of MEMORY, for the graph's name
// Of the categories of memory, in the report's order, which is the same in all reports.
const PALETTE = ["#4477aa", "#99aabb", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#ee8866", "#44bb99", "#bbbbbb"];
const COMMUNICATION = ["#228833", "#aa3377", "#ee8866", "#44bb99"];

class Timeline {
  // `graphs`: those that run one after the other. What lies under a point is {graph, node, text}.
  constructor(canvas, graphs, onHover, onSelect) {
    this.canvas = canvas;
    this.graphs = graphs;
    this.lanes = [...new Set(["compute", ...graphs.flatMap((graph) => graph.slices.map(([lane]) => lane))])];
    this.height = AXIS + this.lanes.length * (LANE + GAP) + GAP + MEMORY + 8;
    this.end = Math.max(...graphs.map((graph) => graph.begin + graph.seconds * 1e6), 1e-3);
    this.slices = this.lanes.map((lane) => this.collect(lane));
    const memories = graphs.flatMap(({ memory }) => memory ?? []);
    this.peak = Math.max(1, ...memories.map(({ peak }) => peak));
    // [category, color] of those that hold anything. All graphs have all categories.
    this.categories = (memories[0]?.categories ?? [])
      .map((name, k) => [name, PALETTE[k % PALETTE.length], k])
      .filter(([, , k]) => memories.some(({ values }) => values.some((row) => row[k])));
    this.marked = null; // "graph:node" → true while a parameter is looked at
    this.view = [0, this.end];
    canvas.style.height = `${this.height}px`;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.listen(onHover, onSelect);
    this.draw();
  }

  // Of a lane, sorted by begin.
  collect(wanted) {
    return this.graphs.flatMap((graph) => graph.slices.filter(([lane]) => lane === wanted).map(([, node, begin, duration, exposed, about]) => {
      const time = () => `${exposed ? "compute waits: " : ""}${formatTime(duration)} from ${formatTime(begin)}, ${graph.phase}`;
      return { graph, node, begin, duration, exposed, text: () => [graph.names[node], time(), about].join("\n") };
    })).sort((a, b) => a.begin - b.begin);
  }

  x(time) { return LABEL + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - LABEL); }
  time(x) { return this.view[0] + ((x - LABEL) / (this.width - LABEL)) * (this.view[1] - this.view[0]); }
  top(lane) { return AXIS + GAP + lane * (LANE + GAP); }
  memoryTop() { return this.top(this.lanes.length); }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const span = Math.min(this.end, Math.max((this.view[1] - this.view[0]) * factor, this.end / 1e6));
    const share = (around - this.view[0]) / (this.view[1] - this.view[0]);
    this.show(around - share * span, span);
  }

  show(begin, span) {
    begin = Math.max(0, Math.min(begin, this.end - span));
    this.view = [begin, begin + span];
    this.draw();
  }

  showNode(graph, node) {
    const found = this.slices.flat().find((slice) => slice.graph === graph && slice.node === node);
    const at = found ? found.begin + found.duration / 2 : graph.begin;
    const span = Math.min(this.end, Math.max(found ? found.duration * 12 : 0, this.end / 40));
    this.show(at - span / 2, span);
  }

  laneColor(lane) { return lane === 0 ? this.colors["--compute"] : COMMUNICATION[(lane - 1) % COMMUNICATION.length]; }

  // Once per frame, however many events ask for it.
  draw() {
    this.width = this.canvas.clientWidth;
    document.getElementById("range").textContent = `${formatTime(this.view[1] - this.view[0])} of ${formatTime(this.end)}`;
    if (this.asked || !this.width) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }

  paint() {
    const ratio = devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    this.colors = Object.fromEntries(["--fore", "--faint", "--compute", "--exposed", "--select"].map((name) => [name, style.getPropertyValue(name).trim()]));
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const c = this.canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.drawAxis(c);
    this.lanes.forEach((lane, n) => this.drawLane(c, lane, n));
    this.drawMemory(c);
  }

  drawAxis(c) {
    const span = this.view[1] - this.view[0];
    const step = 10 ** Math.floor(Math.log10(span / 4));
    const unit = [1, 2, 5, 10].map((n) => n * step).find((n) => span / n <= 9) ?? step * 10;
    c.fillStyle = this.colors["--faint"];
    for (let t = Math.ceil(this.view[0] / unit) * unit; t <= this.view[1]; t += unit) {
      c.fillText(formatTime(t, unit), this.x(t) + 3, AXIS / 2);
      c.fillRect(this.x(t), 0, 0.5, this.height);
    }
    c.fillStyle = this.colors["--select"];
    for (const { begin } of this.graphs) if (begin >= this.view[0] && begin <= this.view[1]) c.fillRect(this.x(begin), 0, 1.5, this.height);
  }

  drawLane(c, lane, number) {
    const top = this.top(number), slices = this.slices[number];
    c.fillStyle = this.colors["--fore"];
    c.fillText(lane.length > 22 ? `${lane.slice(0, 21)}…` : lane, 8, top + LANE / 2);
    const first = Math.max(0, slices.findLastIndex(({ begin }) => begin <= this.view[0]));
    const wide = [], filled = new Float64Array(this.width + 2), waits = filled.slice(); // parts of pixels, by what is narrower
    for (let n = first; n < slices.length && slices[n].begin <= this.view[1]; n++) {
      const { graph, node, begin, duration, exposed } = slices[n];
      const left = Math.max(LABEL, this.x(begin)), right = Math.min(this.width, this.x(begin + duration));
      const marked = this.marked?.has(`${graph.index}:${node}`);
      if (right < LABEL) continue;
      if (right - left >= 1 || marked) { wide.push([graph.names[node], left, right, exposed, marked]); continue; }
      const column = Math.floor(left), border = Math.min(right, column + 1);
      for (const parts of exposed ? [filled, waits] : [filled]) {
        parts[column] += border - left;
        parts[column + 1] += right - border;
      }
    }
    c.globalAlpha = this.marked ? 0.25 : 1;
    for (const [color, parts, below] of [[this.laneColor(number), filled, waits], [this.colors["--exposed"], waits]]) {
      c.fillStyle = color;
      parts.forEach((part, column) => c.fillRect(column, top + LANE * (1 - part), 1, LANE * (part - (below?.[column] ?? 0))));
    }
    for (const [name, left, right, exposed, marked] of wide) {
      const width = Math.max(right - left, marked ? 3 : 1);
      c.globalAlpha = this.marked && !marked ? 0.25 : 1;
      c.fillStyle = exposed ? this.colors["--exposed"] : marked ? this.colors["--select"] : this.laneColor(number);
      c.fillRect(left, top, width - (width > 3 ? 0.6 : 0), LANE);
      if (width > 40) {
        c.fillStyle = "#ffffff";
        c.fillText(this.fitted(name, width - 8), left + 4, top + LANE / 2);
      }
    }
    c.globalAlpha = 1;
  }

  fitted(text, width) {
    const letters = Math.floor(width / 6.2);
    return text.length <= letters ? text : letters > 3 ? `${text.slice(0, letters - 1)}…` : "";
  }

  drawMemory(c) {
    const top = this.memoryTop(), bottom = top + MEMORY;
    c.fillStyle = this.colors["--fore"];
    c.fillText("memory", 8, top + 8);
    c.fillStyle = this.colors["--faint"];
    c.fillText(`peak ${formatBytes(this.peak)}`, 8, top + 26);
    for (const graph of this.graphs.filter(({ memory }) => memory)) {
      const { times, values, positions, peak_position } = graph.memory;
      const first = Math.max(0, times.findLastIndex((time) => time <= this.view[0]));
      const end = graph.begin + graph.seconds * 1e6;
      if (end > this.view[0] && graph.begin < this.view[1]) {
        c.fillStyle = this.colors["--faint"];
        c.fillText(graph.phase, Math.max(LABEL, this.x(graph.begin)) + 5, top + 6);
      }
      let column = -1, highest = -1;
      for (let n = first; n < times.length && times[n] <= this.view[1]; n++) {
        const left = Math.max(LABEL, this.x(times[n]));
        const right = Math.min(this.width, this.x(n + 1 < times.length ? times[n + 1] : end));
        const total = values[n].reduce((a, b) => a + b, 0), narrow = right - left < 1;
        if (Math.floor(left) !== column) { column = Math.floor(left); highest = -1; }
        if (narrow && total <= highest) continue; // in a pixel, the highest is drawn
        highest = Math.max(highest, total);
        let y = bottom;
        for (const [, color, k] of this.categories) {
          const h = (values[n][k] / this.peak) * (MEMORY - PHASE);
          c.fillStyle = color;
          c.fillRect(narrow ? column : left, y - h, narrow ? 1 : right - left, h);
          y -= h;
        }
      }
      const at = times[positions.findLastIndex((position) => position <= peak_position)];
      if (at >= this.view[0] && at <= this.view[1]) {
        c.fillStyle = this.colors["--exposed"];
        c.fillRect(this.x(at), top - 4, 1.5, MEMORY + 4);
      }
    }
  }

  at(px, py) {
    const time = this.time(px), pixel = this.time(1) - this.time(0);
    if (px < LABEL) return null;
    const lane = Math.floor((py - AXIS - GAP) / (LANE + GAP));
    if (lane >= 0 && lane < this.lanes.length && py - this.top(lane) <= LANE) {
      const found = this.slices[lane].findLast(({ begin }) => begin <= time + 1.5 * pixel);
      return found && time <= found.begin + found.duration + 2 * pixel ? found : null;
    }
    const graph = this.graphs.findLast(({ begin }) => begin <= time);
    if (!graph?.memory || py < this.memoryTop() || py > this.memoryTop() + MEMORY) return null;
    const { categories, times, values, positions } = graph.memory;
    const index = Math.max(0, times.findLastIndex((t) => t <= time));
    const text = () => {
      const parts = categories.map((name, k) => [values[index][k], name]).filter(([n]) => n).sort((a, b) => b[0] - a[0]);
      const total = formatBytes(parts.reduce((sum, [n]) => sum + n, 0));
      return [`${total} at ${graph.names[positions[index]]}`, ...parts.map(([n, name]) => `${formatBytes(n).padStart(10)}  ${name}`)].join("\n");
    };
    return { graph, node: positions[index], text };
  }

  listen(onHover, onSelect) {
    const canvas = this.canvas;
    let dragged = null, moved = false;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const span = this.view[1] - this.view[0];
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.show(this.view[0] + ((event.deltaX || event.deltaY) / this.width) * span, span);
      else this.zoom(Math.exp(event.deltaY * 0.002), this.time(Math.max(LABEL, event.offsetX)));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { dragged = [event.offsetX, this.view[0]]; moved = false; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged) {
        const span = this.view[1] - this.view[0];
        moved = moved || Math.abs(event.offsetX - dragged[0]) > 3;
        if (moved) this.show(dragged[1] - ((event.offsetX - dragged[0]) / (this.width - LABEL)) * span, span);
      }
      onHover(this.at(event.offsetX, event.offsetY), event);
    });
    canvas.addEventListener("pointerup", (event) => {
      const found = moved ? null : this.at(event.offsetX, event.offsetY);
      if (found) onSelect(found);
      dragged = null;
    });
    canvas.addEventListener("pointerleave", (event) => onHover(null, event));
    canvas.addEventListener("keydown", (event) => {
      const span = this.view[1] - this.view[0];
      const keys = { "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.6), 0: () => this.show(0, this.end), ArrowLeft: () => this.show(this.view[0] - span / 8, span), ArrowRight: () => this.show(this.view[0] + span / 8, span) };
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
  }
}
