// The axis, the memory strips and the messages of a panel.

function paintAxis(context, place, view, look) {
  const y = place.lanesBottom + 5;
  context.strokeStyle = look.grid;
  context.lineWidth = 1;
  line(context, place.left, y + 0.5, place.right, y + 0.5);
  const [name, size] = unitFor(view.to, TIME_UNITS);
  const most = (place.right - place.left) / 90;
  const { gap, marks } = ticksBetween(view.from / size, view.to / size, most);
  context.strokeStyle = look.muted;
  marks.forEach((mark, i) => {
    const x = Math.round(place.x(view, mark * size)) + 0.5;
    line(context, x, y, x, y + 4);
    const text = tickText(mark, gap) + (i === marks.length - 1 ? ` ${name}` : "");
    write(context, text, x, y + 17, look.muted, "center", 11);
  });
}

function line(context, fromX, fromY, toX, toY) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
}

function amountText(panel, amount) {
  return panel.memory.isBytes ? bytesText(amount) : short(amount);
}

function paintMemory(context, panel, place, view, look) {
  const { left, right, stripHeight } = place;
  const { curves, title } = panel.memory;
  const highest = Math.max(...curves.map((curve) => curve.peak)) || 1;
  const end = Math.min(right, place.x(view, panel.makespan));
  write(context, title, left, place.memoryTop - 7, look.muted, "left", 11);
  write(context, "peak", place.width, place.memoryTop - 7, look.muted, "right", 11);
  curves.forEach((curve, device) => {
    const y = place.stripY(device), base = y + stripHeight;
    const middle = y + stripHeight / 2 + 4;
    write(context, `d${device}`, left - 8, middle, look.ink, "right", Math.min(12, stripHeight));
    write(context, amountText(panel, curve.peak), place.width, middle, look.muted, "right", 11);
    context.fillStyle = look.track;
    context.fillRect(left, y, Math.max(0, end - left), stripHeight);
    const points = curvePoints(curve, place, view, base, (stripHeight - 2) / highest);
    paintCurve(context, points, base, look.curve);
  });
}

/** The corners of a curve in view; of several in one pixel, the highest. */
function curvePoints(curve, place, view, base, scale) {
  const end = Math.min(place.right, place.x(view, curve.time[curve.time.length - 1] ?? 0));
  let y = base - amountAt(curve, view.from) * scale;
  const points = [[place.left, y]];
  let i = firstPlace(curve.time.length, (k) => curve.time[k] > view.from);
  while (i < curve.time.length && curve.time[i] <= view.to) {
    const x = place.x(view, curve.time[i]);
    let most = curve.amount[i], last = most;
    for (i += 1; i < curve.time.length && place.x(view, curve.time[i]) < x + 0.7; i++) {
      last = curve.amount[i];
      most = Math.max(most, last);
    }
    points.push([x, y]);
    if (most > last) points.push([x, base - most * scale]);
    y = base - last * scale;
    points.push([x, y]);
  }
  points.push([Math.max(points[points.length - 1][0], end), y]);
  return points;
}

function paintCurve(context, points, base, colour) {
  context.beginPath();
  context.moveTo(points[0][0], base);
  for (const [x, y] of points) context.lineTo(x, y);
  context.lineTo(points[points.length - 1][0], base);
  context.fillStyle = colour;
  context.globalAlpha = 0.28;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.strokeStyle = colour;
  context.lineWidth = 1.1;
  context.stroke();
}

const MOST_MESSAGES = 3000;

/** A line per message in view, from its maker's lane to its reader's. */
function paintMessages(context, panel, place, view, look) {
  const shown = panel.transfers.filter((one) => one.end > view.from && one.start < view.to);
  context.strokeStyle = look.ink;
  context.lineWidth = 0.8;
  context.globalAlpha = shown.length > MOST_MESSAGES / 10 ? 0.35 : 0.8;
  const every = Math.ceil(shown.length / MOST_MESSAGES);
  clipToLanes(context, place, () => {
    for (let i = 0; i < shown.length; i += every) messageLine(context, shown[i], place, view);
  });
  context.globalAlpha = 1;
}

function clipToLanes(context, place, work) {
  context.save();
  context.beginPath();
  context.rect(place.left, 0, place.right - place.left, place.height);
  context.clip();
  work();
  context.restore();
}

/** From the edge of one lane to the near edge of the other. */
function messageLine(context, transfer, place, view) {
  const from = place.laneY(transfer.maker.lane), to = place.laneY(transfer.reader.lane);
  const isDown = to > from;
  const fromY = from + (isDown ? place.laneHeight : 0);
  const toY = to + (isDown ? 0 : place.laneHeight);
  line(context, place.x(view, transfer.start), fromY, place.x(view, transfer.end), toY);
}

/** The critical path: a line below the ops on it, and from lane to lane. */
function paintPath(context, panel, place, view, look) {
  context.strokeStyle = look.path;
  context.fillStyle = look.path;
  context.lineWidth = 1.6;
  clipToLanes(context, place, () => {
    let y = null;
    for (const { lane, start, end } of panel.path) {
      if (end < view.from || start > view.to) {
        y = null;
        continue;
      }
      const below = place.laneY(lane) + place.laneHeight + 0.5;
      const x = place.x(view, start);
      if (y !== null && y !== below) line(context, x, y, x, below);
      line(context, x, below, place.x(view, end), below);
      y = below;
    }
  });
}
