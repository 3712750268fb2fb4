// Quantities over steps: small line charts with a readout.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 44, right: 8, top: 8, bottom: 22 };

function svgElement(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** The lowest and highest of all values, with a little room. */
function extent(chart) {
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  for (const { steps, values } of chart.lines) {
    values.forEach((value, i) => {
      first = Math.min(first, steps[i]);
      last = Math.max(last, steps[i]);
      if (value === null) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  }
  if (!(high >= low)) return null;
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  const isNearZero = low >= 0 && low < 0.35 * high;
  return { low: isNearZero ? 0 : low - room, high: high + room, first, last: Math.max(last, first + 1) };
}

/** Draw a chart into its figure; returns nothing, the figure then tells by itself. */
function drawChart(figure, chart, colours) {
  const plot = figure.querySelector(".plot"), readout = figure.querySelector(".readout");
  const range = extent(chart);
  plot.replaceChildren();
  if (!range) {
    plot.append(textElement("p", "no values"));
    return;
  }
  const width = plot.clientWidth, height = plot.clientHeight;
  const svg = svgElement("svg", { width, height }, plot);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const x = (step) => MARGIN.left + ((step - range.first) / (range.last - range.first)) * inner.width;
  const y = (value) => MARGIN.top + (1 - (value - range.low) / (range.high - range.low)) * inner.height;
  drawGrid(svg, range, x, y, width);
  chart.lines.forEach((one, i) => drawLine(svg, one, x, y, colours[i % colours.length]));
  listenToChart(plot, svg, chart, { x, y, range, readout, height });
}

function drawGrid(svg, range, x, y, width) {
  const values = ticksBetween(range.low, range.high, 4);
  for (const value of values.marks) {
    const at = Math.round(y(value)) + 0.5;
    svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }, svg);
    const text = svgElement("text", { x: MARGIN.left - 8, y: at + 3.5, "text-anchor": "end" }, svg);
    text.textContent = Math.abs(value) >= 10000 ? short(value) : tickText(value, values.gap);
  }
  const steps = ticksBetween(range.first, range.last, Math.max(2, width / 80));
  steps.marks.filter(Number.isInteger).forEach((step) => {
    const text = svgElement("text", { x: x(step), y: y(range.low) + 16, "text-anchor": "middle" }, svg);
    text.textContent = short(step);
  });
}

function drawLine(svg, one, x, y, colour) {
  let path = "", isBroken = true;
  one.values.forEach((value, i) => {
    if (value !== null) path += `${isBroken ? "M" : "L"}${x(one.steps[i]).toFixed(1)},${y(value).toFixed(1)}`;
    isBroken = value === null;
  });
  const attributes = { d: path, fill: "none", stroke: colour, "stroke-width": 1.5, "stroke-linejoin": "round" };
  svgElement("path", one.isEvaluation ? { ...attributes, opacity: 0.5 } : attributes, svg);
  if (!one.isEvaluation) return;
  one.values.forEach((value, i) => {
    if (value === null) return;
    svgElement("circle", { cx: x(one.steps[i]), cy: y(value), r: 3.2, fill: colour }, svg);
  });
}

/** Pointer and arrow keys read the values at a step; at rest, the last ones are shown. */
function listenToChart(plot, svg, chart, { x, y, range, readout, height }) {
  const ends = { y1: MARGIN.top, y2: height - MARGIN.bottom };
  const cursor = svgElement("line", { class: "cursor", ...ends, visibility: "hidden" }, svg);
  const steps = [...new Set(chart.lines.flatMap((one) => one.steps))].sort((a, b) => a - b);
  let at = steps.length - 1;
  const tell = (isShown) => {
    const step = steps[at];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", isShown ? "visible" : "hidden");
    const values = chart.lines.map((one) => {
      const after = firstPlace(one.steps.length, (i) => one.steps[i] > step);
      const value = after ? one.values[after - 1] : null;
      return value === null ? null : `${chart.lines.length > 1 ? one.name + " " : ""}${short(value)}`;
    });
    readout.textContent = `${values.filter(Boolean).join(", ")} at step ${short(step)}`;
  };
  plot.onpointerdown = plot.onpointermove = (event) => {
    const place = event.clientX - svg.getBoundingClientRect().left;
    const share = (place - x(range.first)) / (x(range.last) - x(range.first));
    const step = range.first + share * (range.last - range.first);
    const after = firstPlace(steps.length, (i) => steps[i] >= step);
    const isNearer = after > 0 && (after === steps.length || step - steps[after - 1] < steps[after] - step);
    at = isNearer ? after - 1 : after;
    tell(true);
  };
  plot.onpointerleave = plot.onblur = (event) => {
    if (event.pointerType === "touch") return; // a tap stays
    at = steps.length - 1;
    tell(false);
  };
  plot.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    at = Math.min(steps.length - 1, Math.max(0, at + by));
    tell(true);
  };
  tell(false);
}
