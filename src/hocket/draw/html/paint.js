// One panel's picture: tracks, steps, ops, axis, memory. Only what is in view is visited.

const FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';

// Lanes whose ops are narrower than this on average are drawn as columns of shares.
const CROWDED = 3.5;
const COLUMN = 4;

/** Fit a canvas to its place and the screen; returns its context in CSS pixels. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0]) canvas.width = pixels[0];
  if (canvas.height !== pixels[1]) canvas.height = pixels[1];
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function write(context, text, x, y, colour, align = "left", size = 12) {
  context.font = `${size}px ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** Paint a panel; `look` holds kinds, fills and surface colours of the theme. */
function paintPanel(context, panel, place, view, look, options) {
  context.textBaseline = "alphabetic";
  paintTracks(context, panel, place, view, look);
  const batches = new Map(), texts = [], isWide = areWide(panel, place.scale(view));
  panel.lanes.forEach((lane, i) => {
    const canvas = { place, view, look, panel, batches, texts, isWide, y: place.laneY(i) };
    placeWork(lane, canvas);
    placeBeside(lane, canvas, options.messages);
  });
  for (const [colour, boxes] of batches) paintBoxes(context, colour, boxes);
  paintTexts(context, texts);
  if (options.messages) paintMessages(context, panel, place, view, look);
  if (options.path) paintPath(context, panel, place, view, look);
  paintAxis(context, place, view, look);
  if (options.memory) paintMemory(context, panel, place, view, look);
}

function paintTracks(context, panel, place, view, look) {
  const { left, right, laneHeight } = place;
  const within = (time) => Math.min(right, Math.max(left, place.x(view, time)));
  write(context, "bubble", place.width, place.lanesTop - 8, look.muted, "right", 11);
  panel.lanes.forEach((lane, i) => {
    const y = place.laneY(i), base = y + laneHeight / 2 + 4;
    write(context, lane.label, left - 8, base, look.ink, "right");
    write(context, percentText(lane.bubble), place.width, base, look.muted, "right", 11);
    context.fillStyle = look.track;
    context.fillRect(left, y, within(panel.makespan) - left, laneHeight);
    context.fillStyle = look.band;
    const ends = panel.steps[i];
    const first = firstPlace(ends.length, (step) => ends[step] > view.from);
    for (let step = first | 1; step < ends.length && ends[step - 1] < view.to; step += 2) {
      const x = within(ends[step - 1]);
      context.fillRect(x, y, within(ends[step]) - x, laneHeight);
    }
  });
  if (panel.steps[0].length > 1) paintStepNames(context, panel, place, view, look);
}

function paintStepNames(context, panel, place, view, look) {
  const ends = panel.steps[0];
  let free = place.left;
  const first = firstPlace(ends.length, (step) => ends[step] > view.from);
  for (let step = first; step < ends.length; step++) {
    const begin = step ? ends[step - 1] : 0;
    const x = Math.max(place.left, place.x(view, begin));
    if (x > place.right - 30) break;
    if (x < free) continue;
    write(context, `step ${step}`, x, place.lanesTop - 8, look.muted, "left", 11);
    free = x + 52;
  }
}

function boxesOf(batches, colour) {
  let boxes = batches.get(colour);
  if (!boxes) batches.set(colour, (boxes = []));
  return boxes;
}

/** Ops that keep the lane busy: each a box, or where they are too narrow, in columns. */
function placeWork(lane, canvas) {
  const { place, view } = canvas;
  const range = seen(lane.work, view.from, view.to);
  const { start, end } = lane.work;
  const [low, high] = range;
  if (high <= low) return;
  const width = (Math.min(view.to, end[high - 1]) - Math.max(view.from, start[low])) * place.scale(view);
  if (width / (high - low) < CROWDED) placeColumns(lane, canvas, range);
  else placeBoxes(lane, canvas, range);
}

function placeBoxes({ ops, work }, canvas, [low, high]) {
  const { place, view, look, panel, batches, y } = canvas;
  const scale = place.scale(view), height = place.laneHeight;
  const ratio = window.devicePixelRatio || 1;
  const snap = (x) => Math.round(x * ratio) / ratio;
  for (let i = low; i < high; i++) {
    const begin = Math.max(place.left, place.left + (work.start[i] - view.from) * scale);
    const end = Math.min(place.right, place.left + (work.end[i] - view.from) * scale);
    if (end <= begin) continue;
    const op = work.op[i];
    const fill = look.fills[panel.tones[ops.stage[op]]][ops.kind[op]];
    const x = snap(begin), gap = end - begin > 5 ? 1 : end - begin > 2 ? 0.5 : 0;
    const width = Math.max(1 / ratio, snap(end) - x - gap);
    boxesOf(batches, fill[0]).push(x, y, width, height);
    placeText(canvas, ops, op, x, width, fill[1]);
  }
}

/**
 * Ops too narrow to be seen one by one: each column is stacked from their colours, each
 * as high as its share of the column's time, so that what stays empty is the bubble.
 * Columns stand still in time, so that they do not flicker when the view moves.
 */
function placeColumns({ ops, work }, canvas, [low, high]) {
  const { place, view, look, panel, batches, y } = canvas;
  const scale = place.scale(view) / COLUMN, numKinds = look.kinds.length;
  const shares = new Float64Array(look.fills.length * numKinds);
  let column = NaN;
  const close = () => {
    const x = place.left + (column - view.from * scale) * COLUMN;
    const left = Math.round(Math.max(place.left, x));
    const right = Math.round(Math.min(place.right, x + COLUMN));
    let base = y + place.laneHeight;
    shares.forEach((share, i) => {
      if (!share) return;
      const height = share * place.laneHeight;
      base -= height;
      const [colour] = look.fills[Math.floor(i / numKinds)][i % numKinds];
      boxesOf(batches, colour).push(left, base, right - left, height);
    });
    shares.fill(0);
  };
  for (let i = low; i < high; i++) {
    const op = work.op[i], which = panel.tones[ops.stage[op]] * numKinds + ops.kind[op];
    let from = Math.max(work.start[i], view.from) * scale;
    const to = Math.min(work.end[i], view.to) * scale;
    while (from < to) {
      if (Math.floor(from) !== column) {
        close();
        column = Math.floor(from);
      }
      const next = Math.min(to, column + 1);
      shares[which] += next - from;
      from = next;
    }
  }
  close();
}

/** The microbatch's number where it fits, and the whole op where most ops are wide. */
function placeText(canvas, ops, op, x, width, colour) {
  if (width < 10 || canvas.place.laneHeight < 13) return;
  const text = canvas.isWide ? opText(ops, op, canvas.look.kinds) : numberText(ops, op);
  if (!text || text.length * 6.4 + 3 > width) return;
  canvas.texts.push(text, x + width / 2, canvas.y + canvas.place.laneHeight / 2 + 4, colour);
}

function numberText(ops, op) {
  return ops.microbatch[op] < 0 ? "" : String(ops.microbatch[op]);
}

/** Whether ops are wide enough, on average, to carry their whole name. */
function areWide(panel, scale) {
  return panel.meanDuration * scale > 64;
}

/** The text of an op, as `str(op)` writes it. */
function opText(ops, i, kinds) {
  const microbatch = ops.microbatch[i] < 0 ? "" : ops.microbatch[i];
  const step = ops.step[i] ? `@${ops.step[i]}` : "";
  return `${ops.stage[i]}${kinds[ops.kind[i]].letter}${microbatch}${step}`;
}

/** Reductions, and messages where asked for, as bars at the foot of the lane. */
function placeBeside(lane, canvas, showMessages) {
  const { place, view, look, panel, batches, y } = canvas;
  const [low, high] = seen(lane.beside, view.from, view.to);
  for (let i = low; i < high; i++) {
    const op = lane.beside.op[i], kind = lane.ops.kind[op];
    if (look.kinds[kind].message && !showMessages) continue;
    const begin = Math.max(place.left, place.x(view, lane.beside.start[i]));
    const end = Math.min(place.right, place.x(view, lane.beside.end[i]));
    const colour = look.fills[panel.tones[lane.ops.stage[op]]][kind][0];
    boxesOf(batches, colour).push(begin, y + place.laneHeight - 4, Math.max(1, end - begin), 4);
  }
}

function paintBoxes(context, colour, boxes) {
  context.fillStyle = colour;
  for (let i = 0; i < boxes.length; i += 4) {
    if (boxes[i + 2] < 9) context.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
    else {
      context.beginPath();
      context.roundRect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3], 2);
      context.fill();
    }
  }
}

function paintTexts(context, texts) {
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  for (let i = 0; i < texts.length; i += 4) {
    if (context.fillStyle !== texts[i + 3]) context.fillStyle = texts[i + 3];
    context.fillText(texts[i], texts[i + 1], texts[i + 2]);
  }
}
