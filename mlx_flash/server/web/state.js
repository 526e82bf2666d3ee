// Memory, disk and speed of the engines, as the server publishes them.

const NUM_SAMPLES = 60; // of a chart
const engines = new Map(); // by number and model

/** Return an element with a class and a text. */
export function make(tag, name = "", text = "", space = "http://www.w3.org/1999/xhtml") {
  const element = document.createElementNS(space, tag);
  if (name) element.setAttribute("class", name);
  element.textContent = text;
  return element;
}

/** Return a number with three digits. */
export const rate = (value) => value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);

function gb(bytes) {
  const [size, unit] = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return bytes ? `${rate(bytes / size)} ${unit}` : "0 B";
}

function barOf(share) {
  const bar = make("div", share > 1 ? "bar full" : "bar"), inside = make("div");
  inside.style.width = `${Math.min(100, 100 * share)}%`;
  bar.append(inside);
  return bar;
}

function chartOf(values) {
  const svg = (tag, name) => make(tag, name, "", "http://www.w3.org/2000/svg");
  const chart = svg("svg", "chart"), area = svg("polygon"), line = svg("polyline"), top = Math.max(...values, 1e-9);
  const places = values.map((v, i) => [100 - (100 * (values.length - 1 - i)) / (NUM_SAMPLES - 1), 29 - (27 * v) / top]);
  const points = places.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" ");
  for (const [name, value] of [["viewBox", "0 0 100 30"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) {
    chart.setAttribute(name, value);
  }
  area.setAttribute("points", `${places[0][0].toFixed(2)},30 ${points} 100,30`);
  line.setAttribute("points", points);
  chart.append(area, line);
  return chart;
}

function factOf(name, value, picture) {
  const box = make("div", "fact"), words = make("div", "words");
  words.append(make("span", "name", name), make("span", "value", value));
  box.append(words, ...(picture ? [picture] : []));
  return box;
}

/** The last numbers of an engine. */
class Engine {
  samples = [];
  tokens = [];
  read = [];

  add({ model, clock, facts }) {
    if (!this.samples.length || clock > this.samples.at(-1).clock) this.samples.push({ clock, facts });
    if (this.samples.length > 5) this.samples.shift();
    const oldest = this.samples[0], seconds = clock - oldest.clock;
    const speed = (name) => (seconds > 0 ? Math.max(0, (facts[name] || 0) - (oldest.facts[name] || 0)) / seconds : 0);
    this.tokens = [...this.tokens, speed("passes.num_tokens_out")].slice(-NUM_SAMPLES);
    this.read = [...this.read, speed("read.nbytes")].slice(-NUM_SAMPLES);
    const used = facts["memory.footprint"] || 0, budget = facts["budget.bytes"] || facts["plan.budget_bytes"] || 0;
    const disk = facts["plan.disk_bytes_per_second"], tokens = this.tokens.at(-1), read = this.read.at(-1);
    const box = make("section", "engine");
    box.append(
      make("h2", "", model),
      factOf("Memory", budget ? `${gb(used)} of ${gb(budget)}` : gb(used), barOf(budget ? used / budget : 0)),
      factOf("Largest so far", gb(facts["memory.peak_footprint"])),
      factOf("Tokens/s", rate(tokens), chartOf(this.tokens)),
      factOf("Disk reads", `${gb(read)}/s${disk ? ` of ${gb(disk)}/s` : ""}`, chartOf(this.read)),
      factOf("Waits for the disk", `${Math.min(100, 100 * speed("stream.wait_seconds")).toFixed(0)} %`),
      factOf("Read for each pass", gb(facts["plan.read_bytes_per_pass"])),
      ...(facts["kv.disk_bytes"] ? [factOf("Keys and values on disk", gb(facts["kv.disk_bytes"]))] : []),
      factOf("Passes", facts["passes.num_passes"] || 0),
      factOf("Tokens generated", facts["passes.num_tokens_out"] || 0),
    );
    return { box, used, budget, tokens, read };
  }
}

/** Show engines in an element, and return a few words about each of memory, speed and disk. */
export function showEngines(element, found) {
  const ids = found.map((each) => `${each.number} ${each.model}`);
  for (const id of [...engines.keys()]) if (!ids.includes(id)) engines.delete(id);
  for (const id of ids) if (!engines.has(id)) engines.set(id, new Engine());
  const now = found.map((each, i) => engines.get(ids[i]).add(each));
  element.replaceChildren(...now.map((each) => each.box));
  if (!now.length) return ["No model in memory publishes its state."];
  const most = (name) => Math.max(...now.map((each) => each[name])), sum = (name) => now.reduce((n, each) => n + each[name], 0);
  return [`${gb(most("used"))} of ${gb(most("budget"))}`, `${rate(sum("tokens"))} tok/s`, `disk ${gb(sum("read"))}/s`];
}
