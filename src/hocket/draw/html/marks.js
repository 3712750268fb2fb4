// What lies over the picture: the cursor, the op pointed at, its messages, a range.

/** Paint the marks of one panel. `focus` is a place `{panel, lane, index}` or null. */
function paintMarks(context, panel, place, view, look, { focus, cursor, range, isOwn }) {
  if (range) paintRange(context, place, view, look, range);
  if (cursor !== null) paintCursor(context, place, view, look, cursor);
  if (!focus) return;
  clipToLanes(context, place, () => {
    const key = `${focus.lane}:${focus.index}`;
    context.strokeStyle = look.ink;
    context.lineWidth = 1.4;
    for (const transfer of panel.transfersOf().get(key) ?? []) {
      messageLine(context, transfer, place, view);
      const other = sameOp(transfer.maker, focus) ? transfer.reader : transfer.maker;
      outline(context, panel, place, view, look, other, 1);
    }
    outline(context, panel, place, view, look, focus, isOwn ? 2.5 : 1.5);
  });
}

function sameOp(a, b) {
  return a.lane === b.lane && a.index === b.index;
}

function outline(context, panel, place, view, look, where, width) {
  const lane = panel.lanes[where.lane], { start, end, kind } = lane.ops;
  const isBeside = look.kinds[kind[where.index]].beside;
  const x = place.x(view, start[where.index]);
  const right = Math.max(x + 2, place.x(view, end[where.index]));
  const height = isBeside ? 4 : place.laneHeight;
  const y = place.laneY(where.lane) + place.laneHeight - height;
  context.strokeStyle = look.ink;
  context.lineWidth = width;
  context.strokeRect(x, y, right - x, height);
}

function paintCursor(context, place, view, look, time) {
  const x = Math.round(place.x(view, time)) + 0.5;
  if (x < place.left || x > place.right + 1) return;
  context.strokeStyle = look.muted;
  context.lineWidth = 1;
  line(context, x, place.lanesTop - 3, x, place.height - 6);
  const text = instantText(time, view.span());
  const half = text.length * 3.4 + 5, y = place.lanesBottom + 22;
  const middle = Math.min(place.right - half, Math.max(place.left + half, x));
  context.fillStyle = look.page;
  context.fillRect(middle - half, y - 12, 2 * half, 16);
  write(context, text, middle, y, look.ink, "center", 11);
}

function paintRange(context, place, view, look, [from, to]) {
  const x = Math.max(place.left, place.x(view, from));
  const right = Math.min(place.right, place.x(view, to));
  context.fillStyle = look.focus;
  context.globalAlpha = 0.18;
  context.fillRect(x, place.lanesTop - 3, right - x, place.height - place.lanesTop - 3);
  context.globalAlpha = 1;
}
