// A plot of the last minutes: a line, and a fainter one above it.

const SVG = "http://www.w3.org/2000/svg";
const LONGEST_GAP = 6; // entries without a value that a line goes across
const ROOM = { left: 34, right: 2, top: 6, bottom: 18 };

function make(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A round number, at least as large.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-3)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((each) => each >= value * 0.999);
}

const short = (value) =>
  value >= 10000 ? `${value / 1000}k` : `${Number(value.toPrecision(3))}`;

export class Plot {
  constructor(svg, names, unit) {
    this.svg = svg;
    this.names = names;
    this.unit = unit;
    this.at = null; // the entry under the pointer
    svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    svg.addEventListener("pointerleave", () => this.point(null));
  }

  point(x) {
    this.at = x;
    if (this.history) this.draw(this.history);
  }

  draw(history) {
    this.history = history;
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const lines = this.names.map((name) => history[name]);
    const top = rounded(Math.max(1, ...lines.flat().filter((value) => value !== null)));
    const count = lines[0].length;
    const x = (i) => ROOM.left + ((width - ROOM.left - ROOM.right) * i) / (count - 1);
    const y = (value) => height - ROOM.bottom - ((height - ROOM.top - ROOM.bottom) * value) / top;
    this.svg.replaceChildren(
      ...this.frame(width, top, y),
      ...this.high(lines[1], x, y),
      ...this.low(lines[0], x, y),
      ...this.readout(lines, count, x, width, y),
    );
  }

  frame(width, top, y) {
    const ticks = [0, top / 2, top].flatMap((value) => [
      make("line", { class: "grid", x1: ROOM.left, x2: width, y1: y(value), y2: y(value) }),
      make("text", { x: ROOM.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    ]);
    const under = y(0) + 14;
    return [
      ...ticks,
      make("text", { x: ROOM.left, y: under }, "5 min ago"),
      make("text", { x: width, y: under, "text-anchor": "end" }, "now"),
    ];
  }

  high(values, x, y) {
    if (!values) return [];
    return [make("path", { class: "high", d: path(values, x, y) })];
  }

  low(values, x, y) {
    const area = runs(values).map((run) => {
      const [first, last] = [run[0][0], run.at(-1)[0]];
      return `M${x(first)} ${y(0)}L${points(run, x, y)}L${x(last)} ${y(0)}Z`;
    });
    return [
      make("path", { class: "area", d: area.join("") }),
      make("path", { class: "line", d: path(values, x, y) }),
    ];
  }

  // What the entry under the pointer says.
  readout(lines, count, x, width, y) {
    if (this.at === null) return [];
    const share = (this.at - ROOM.left) / (width - ROOM.left - ROOM.right);
    const i = Math.min(Math.max(Math.round(share * (count - 1)), 0), count - 1);
    const values = lines.map((values) => values[i]).filter((value) => value !== null);
    const text = values.length ? `${values.map(short).join(" / ")} ${this.unit}` : "nothing";
    const at = x(i);
    const anchor = at > width / 2 ? "end" : "start";
    return [
      make("line", { class: "at", x1: at, x2: at, y1: ROOM.top, y2: y(0) }),
      make("text", { x: at + (anchor === "end" ? -6 : 6), y: ROOM.top + 8, "text-anchor": anchor },
        `${text}, ${(count - i) * this.history.seconds} s ago`),
    ];
  }
}

// Values close to each other: lists of [place, value].
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (!found.length || found.at(-1).at(-1)[0] < i - LONGEST_GAP) found.push([]);
    found.at(-1).push([i, value]);
  });
  return found;
}

const points = (run, x, y) =>
  run.map(([i, value]) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("L");

function path(values, x, y) {
  return runs(values).map((run) => {
    // A value on its own would be a line without a length.
    const line = run.length === 1 ? [run[0], [run[0][0] + 0.5, run[0][1]]] : run;
    return `M${points(line, x, y)}`;
  }).join("");
}
