// The part of the time axis that is in view, shared by all panels.

/** A window on the times from 0 to `longest`; `onChange` is called when it moves. */
function makeView(longest, onChange) {
  const least = longest * 1e-6;
  const view = { from: 0, to: longest, longest };

  view.show = (from, to) => {
    const span = Math.min(longest, Math.max(least, to - from));
    const begin = Math.min(Math.max(0, from), longest - span);
    if (begin === view.from && begin + span === view.to) return false;
    view.from = begin;
    view.to = begin + span;
    onChange();
    return true;
  };
  view.span = () => view.to - view.from;
  view.isWhole = () => view.span() >= longest * (1 - 1e-12);
  view.fit = () => view.show(0, longest);
  view.moveBy = (time) => view.show(view.from + time, view.to + time);
  /** Make everything `factor` times as large, and leave `time` where it is. */
  view.zoom = (factor, time = (view.from + view.to) / 2) =>
    view.show(time - (time - view.from) / factor, time + (view.to - time) / factor);
  /** Bring a stretch of time into view, if it is not. */
  view.reveal = (from, to) => {
    if (from >= view.from && to <= view.to) return;
    const span = Math.max(view.span(), 1.5 * (to - from));
    const middle = (from + to) / 2;
    view.show(middle - span / 2, middle + span / 2);
  };
  return view;
}

/** Where things are on a panel's canvas, in CSS pixels. */
function layOut(panel, width, showMemory) {
  const numLanes = panel.lanes.length, numDevices = panel.memory.curves.length;
  const longestLabel = Math.max(...panel.lanes.map((lane) => lane.label.length));
  const laneHeight = numLanes <= 8 ? 24 : numLanes <= 20 ? 19 : 13;
  const stripHeight = numDevices <= 8 ? 22 : numDevices <= 20 ? 15 : 10;
  const place = {
    width,
    left: Math.max(28, 14 + 7.5 * longestLabel),
    right: width - 62,
    lanesTop: 22,
    laneHeight,
    laneGap: 3,
    stripHeight,
    stripGap: 3,
  };
  place.lanesBottom = place.lanesTop + numLanes * (laneHeight + 3) - 3;
  place.memoryTop = place.lanesBottom + 50;
  place.memoryBottom = place.memoryTop + numDevices * (stripHeight + 3) - 3;
  place.height = showMemory ? place.memoryBottom + 8 : place.lanesBottom + 28;
  place.laneY = (lane) => place.lanesTop + lane * (laneHeight + 3);
  place.stripY = (device) => place.memoryTop + device * (stripHeight + 3);
  place.scale = (view) => (place.right - place.left) / view.span();
  place.x = (view, time) => place.left + (time - view.from) * place.scale(view);
  place.time = (view, x) => view.from + (x - place.left) / place.scale(view);
  return place;
}
