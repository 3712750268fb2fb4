// Puts the page together: reads the data, draws, and answers to the reader.

const data = JSON.parse(document.getElementById("data").textContent);
const panels = data.panels.map((raw) => readPanel(raw, data.kinds));
const figures = [...document.querySelectorAll(".panel")];
const tip = document.getElementById("tip");
const darkQuery = matchMedia("(prefers-color-scheme: dark)");
const options = { messages: false, memory: true, path: true, look: null };
const state = { hovered: null, pinned: null, cursor: null, range: null, isTapped: false };
const view = makeView(Math.max(...panels.map((panel) => panel.makespan)) || 1, () => redraw("picture"));
const places = panels.map(() => null);
const overview = makeOverview(document.querySelector(".overview canvas"), panels, view, () => places[0]);

// ------------------------------------------------------------ drawing

function readLook() {
  const style = getComputedStyle(document.documentElement);
  const look = { kinds: data.kinds, causes: data.causes, fills: data.fills[darkQuery.matches ? "dark" : "light"] };
  for (const name of ["page", "track", "band", "ink", "muted", "grid", "curve", "focus", "path"]) {
    look[name] = style.getPropertyValue(`--${name}`).trim();
  }
  return look;
}

let wanted = null;

/** Draw in the next frame: the pictures and their marks, or the marks alone. */
function redraw(what) {
  if (wanted === null) requestAnimationFrame(drawWanted);
  if (wanted !== "picture") wanted = what;
}

function drawWanted() {
  if (wanted === "picture") drawPictures();
  drawMarks();
  wanted = null;
}

function drawPictures() {
  figures.forEach((figure, i) => {
    const place = places[i];
    const context = prepare(figure.querySelector(".picture"), place.width, place.height);
    paintPanel(context, panels[i], place, view, options.look, options);
  });
  overview.paint(options.look);
  const whole = timeText(view.longest);
  const [from, to] = [view.from, view.to].map((time) => instantText(time, view.span()));
  document.getElementById("range").textContent = view.isWhole() ? whole : `${from} to ${to} of ${whole}`;
  tellStep();
}

/** The op in the middle of attention, as it lies in one panel. */
function focusIn(number) {
  const focus = state.pinned ?? state.hovered;
  if (!focus || focus.found.what !== "op") return null;
  if (focus.panel === number) return focus.found;
  const { lane, index } = focus.found;
  return panels[number].placeOf().get(opKey(panels[focus.panel].lanes[lane].ops, index)) ?? null;
}

function drawMarks() {
  figures.forEach((figure, i) => {
    const place = places[i];
    const context = prepare(figure.querySelector(".marks"), place.width, place.height);
    const isOwn = (state.pinned ?? state.hovered)?.panel === i;
    const marks = { focus: focusIn(i), cursor: state.cursor, range: state.range, isOwn };
    paintMarks(context, panels[i], place, view, options.look, marks);
  });
}

function layOutAll() {
  options.look = readLook();
  figures.forEach((figure, i) => {
    places[i] = layOut(panels[i], figure.querySelector(".stack").clientWidth, options.memory);
  });
  const left = Math.max(...places.map((place) => place.left));
  for (const place of places) place.left = left;
  drawLegend();
  document.querySelectorAll(".chart").forEach((figure) => {
    const colours = ["F", "B", "L", "R"].map((letter) => options.look.fills[0][kindOf(letter)][0]);
    drawChart(figure, data.charts[Number(figure.dataset.chart)], colours);
  });
  redraw("picture");
}

function kindOf(letter) {
  return data.kinds.findIndex((kind) => kind.letter === letter);
}

function drawLegend() {
  const used = new Set();
  for (const { ops } of panels.flatMap((panel) => panel.lanes)) {
    ops.kind.forEach((kind, i) => ops.end[i] > ops.start[i] && used.add(kind));
  }
  const items = data.kinds.flatMap((kind, code) => {
    if (!used.has(code) || (kind.message && !options.messages)) return [];
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.style.background = options.look.fills[0][code][0];
    item.append(swatch, kind.name);
    return [item];
  });
  if (data.paler) {
    const note = textElement("li", data.paler);
    note.className = "note";
    items.push(note);
  }
  document.querySelector(".legend").replaceChildren(...items);
}

// ------------------------------------------------------------ pointing

function wordsFor({ panel, found }) {
  const others = panels.filter((_, i) => i !== panel);
  return describe(found, panels[panel], others, options.look, view.span());
}

function point(number, event) {
  const box = figures[number].querySelector(".stack").getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const place = places[number];
  const found = whatIsAt(panels[number], place, view, x, y, options);
  state.hovered = found && { panel: number, found };
  state.cursor = x >= place.left && x <= place.right ? place.time(view, x) : null;
  if (!state.pinned) {
    if (found) showTip(tip, wordsFor(state.hovered), event.clientX, event.clientY);
    else tip.hidden = true;
  }
  redraw("marks");
}

/** Hold on to an op: show its tip beside it, and say it. */
function pin(panel, found) {
  state.pinned = { panel, found };
  const { ops } = panels[panel].lanes[found.lane];
  view.reveal(ops.start[found.index], ops.end[found.index]);
  const words = wordsFor(state.pinned), place = places[panel];
  const box = figures[panel].querySelector(".stack").getBoundingClientRect();
  const x = Math.min(place.right, place.x(view, ops.end[found.index]));
  showTip(tip, words, box.left + x, box.top + place.laneY(found.lane));
  const said = words.rows.map(([name, value]) => `${name} ${value}`).join(", ");
  document.getElementById("spoken").textContent = `${words.title}, ${words.about}, ${said}`;
  redraw("marks");
}

function release() {
  state.pinned = state.hovered = state.cursor = null;
  state.isTapped = false;
  tip.hidden = true;
  redraw("marks");
}

/** From the pinned op to the next on its lane, or to the one at its time on another. */
function walk(along, across) {
  const focused = figures.indexOf(document.activeElement);
  const panel = state.pinned?.panel ?? Math.max(0, focused);
  const { lanes } = panels[panel];
  const from = state.pinned?.found ?? { lane: 0, index: -1 };
  const time = from.index < 0 ? view.from : lanes[from.lane].ops.start[from.index];
  const lane = Math.min(lanes.length - 1, Math.max(0, from.lane + across));
  const { work } = lanes[lane];
  const near = firstPlace(work.op.length, (i) => work.start[i] >= time - 1e-15);
  const next = from.index < 0 || across ? near : work.op.indexOf(from.index) + along;
  const index = work.op[Math.min(work.op.length - 1, Math.max(0, next))];
  if (index !== undefined) pin(panel, { what: "op", lane, index, time });
}

// ------------------------------------------------------------ terms

/** Terms explain themselves when they are pointed at, tapped or focused. */
function listenToTerms() {
  for (const term of document.querySelectorAll("[data-meaning]")) {
    const show = () => {
      const { left, bottom } = term.getBoundingClientRect();
      const words = { title: term.textContent, about: term.dataset.meaning, rows: [] };
      showTip(tip, words, left, bottom - 12);
    };
    const hide = () => (tip.hidden = true);
    term.addEventListener("pointerenter", show);
    term.addEventListener("click", show);
    term.addEventListener("focus", show);
    term.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hide());
    term.addEventListener("blur", hide);
  }
}

// ------------------------------------------------------------ steps

const numSteps = panels[0].steps[0].length;

/** From when to when a step lasts over all lanes of all panels. */
function stepRange(step) {
  const ends = panels.flatMap((panel) => panel.steps.map((lane) => lane[step] ?? 0));
  const begins = panels.flatMap((panel) => panel.steps.map((lane) => (step ? lane[step - 1] ?? 0 : 0)));
  return [Math.min(...begins), Math.max(...ends)];
}

function stepInView() {
  const ends = panels[0].steps[0], middle = (view.from + view.to) / 2;
  return Math.min(numSteps - 1, firstPlace(numSteps, (step) => ends[step] > middle));
}

function tellStep() {
  document.getElementById("step").textContent = view.isWhole() ? `${numSteps} steps` : `step ${stepInView()}`;
}

function goToStep(by) {
  if (numSteps < 2) return;
  const step = view.isWhole() ? (by < 0 ? numSteps - 1 : 0) : stepInView() + by;
  view.show(...stepRange(Math.min(numSteps - 1, Math.max(0, step))));
}

// ------------------------------------------------------------ wiring

const actions = {
  in: () => view.zoom(1.6),
  out: () => view.zoom(1 / 1.6),
  fit: () => view.fit(),
  previous: () => goToStep(-1),
  step: () => goToStep(0),
  next: () => goToStep(1),
  release,
  walk,
};

function listenToPanel(figure, number) {
  const marks = figure.querySelector(".marks");
  const timeAt = (event) => places[number].time(view, event.clientX - marks.getBoundingClientRect().left);
  listenToWheel(marks, timeAt, view);
  listenToDrag(marks, timeAt, view, {
    onRange: (range) => {
      state.range = range;
      redraw("marks");
    },
    onClick: (event) => {
      state.pinned = null;
      point(number, event); // a finger has not moved before it taps
      const { hovered } = state;
      if (hovered?.found.what === "op") pin(hovered.panel, hovered.found);
      else if (event.pointerType === "touch" && hovered) state.isTapped = true;
      else release();
    },
  });
  marks.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") state.isTapped = false;
    point(number, event);
  });
  marks.addEventListener("pointerleave", () => {
    state.hovered = state.cursor = null;
    if (!state.pinned && !state.isTapped) tip.hidden = true;
    redraw("marks");
  });
  const steady = panels[number];
  const makespan = timeText(steady.makespan);
  const bubble = steady.lanes.reduce((sum, lane) => sum + lane.bubble, 0) / steady.lanes.length;
  figure.querySelector(".facts").textContent = `${makespan}, bubble ${percentText(bubble)}`;
}

figures.forEach(listenToPanel);
listenToKeys(actions, view);
document.querySelectorAll("[data-do]").forEach((button) => {
  button.addEventListener("click", () => actions[button.dataset.do]());
});
document.getElementById("steps").hidden = numSteps < 2;
const hasMessages = panels.some((panel) => panel.transfers.length > 0);
document.getElementById("show-messages").closest("label").hidden = !hasMessages;
for (const name of ["messages", "memory", "path"]) {
  const box = document.getElementById(`show-${name}`);
  box.addEventListener("change", () => {
    options[name] = box.checked;
    layOutAll();
  });
}
listenToTerms();
addEventListener("scroll", () => (state.pinned || state.isTapped) && release(), { passive: true });
addEventListener("resize", layOutAll);
darkQuery.addEventListener("change", layOutAll);
layOutAll();

// For tests and the curious.
window.hocket = { view, state, panels, places, drawNow: drawPictures };
