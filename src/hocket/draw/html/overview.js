// The whole run in one strip: how many lanes work, and which part is in view.

const OVERVIEW_ROW = 18;

/** The share of lanes at work in each of `count` equal parts of the axis. */
function workShares(panel, longest, count) {
  const shares = new Float64Array(count);
  const perPart = longest / count;
  for (const { work } of panel.lanes) {
    for (let i = 0; i < work.op.length; i++) {
      let from = work.start[i] / perPart;
      const to = Math.min(count, work.end[i] / perPart);
      while (from < to) {
        const part = Math.floor(from), end = Math.min(to, part + 1);
        shares[part] += end - from;
        from = end > from ? end : part + 1;
      }
    }
  }
  return shares.map((share) => share / panel.lanes.length);
}

function makeOverview(canvas, panels, view, placeOf) {
  let shares = [], sharesFor = 0;

  function paint(look) {
    const place = placeOf();
    const height = panels.length * (OVERVIEW_ROW + 2) + 4;
    const context = prepare(canvas, place.width, height);
    const width = place.right - place.left;
    const count = Math.max(1, Math.floor(width / 2));
    if (sharesFor !== count) {
      shares = panels.map((panel) => workShares(panel, view.longest, count));
      sharesFor = count;
    }
    shares.forEach((row, i) => {
      const base = (i + 1) * (OVERVIEW_ROW + 2);
      const end = place.left + (width * panels[i].makespan) / view.longest;
      context.fillStyle = look.track;
      context.fillRect(place.left, base - OVERVIEW_ROW, end - place.left, OVERVIEW_ROW);
      context.fillStyle = look.curve;
      context.globalAlpha = 0.55;
      row.forEach((share, k) => {
        const x = place.left + (k * width) / count;
        context.fillRect(x, base - share * OVERVIEW_ROW, width / count, share * OVERVIEW_ROW);
      });
      context.globalAlpha = 1;
    });
    paintWindow(context, place, look, height);
  }

  function paintWindow(context, place, look, height) {
    const width = place.right - place.left;
    const x = place.left + (width * view.from) / view.longest;
    const right = place.left + (width * view.to) / view.longest;
    context.fillStyle = look.page;
    context.globalAlpha = 0.72;
    context.fillRect(place.left, 0, x - place.left, height);
    context.fillRect(right, 0, place.right - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = look.focus;
    context.lineWidth = 1.5;
    context.strokeRect(x, 1, Math.max(2, right - x), height - 2);
  }

  /** A drag inside the window moves it, on its edge resizes it, elsewhere draws it anew. */
  function listen() {
    let drag = null;
    const timeAt = (event) => {
      const place = placeOf();
      const x = event.clientX - canvas.getBoundingClientRect().left;
      return ((x - place.left) / (place.right - place.left)) * view.longest;
    };
    const gripAt = (time) => {
      const near = (view.longest * 6) / canvas.clientWidth;
      if (!view.isWhole() && Math.abs(time - view.from) < near) return "from";
      if (!view.isWhole() && Math.abs(time - view.to) < near) return "to";
      return !view.isWhole() && time > view.from && time < view.to ? "window" : "new";
    };
    const cursors = { from: "ew-resize", to: "ew-resize", window: "grab", new: "crosshair" };
    canvas.addEventListener("pointerdown", (event) => {
      const time = timeAt(event);
      drag = { grip: gripAt(time), time, from: view.from, to: view.to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const time = timeAt(event);
      if (!drag) {
        canvas.style.cursor = cursors[gripAt(time)];
        return;
      }
      const by = time - drag.time;
      if (drag.grip === "window") view.show(drag.from + by, drag.to + by);
      else if (drag.grip === "from") view.show(Math.min(time, drag.to), drag.to);
      else if (drag.grip === "to") view.show(drag.from, Math.max(time, drag.from));
      else view.show(Math.min(time, drag.time), Math.max(time, drag.time));
    });
    for (const type of ["pointerup", "pointercancel"]) canvas.addEventListener(type, () => (drag = null));
    canvas.addEventListener("dblclick", () => view.fit());
  }

  listen();
  return { paint };
}
