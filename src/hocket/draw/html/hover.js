// What is at a point, and the words for it.

/** What a panel shows at a point: an op, a stretch of bubble, a memory strip or nothing. */
function whatIsAt(panel, place, view, x, y, options) {
  const time = place.time(view, x);
  if (x < place.left || x > place.right || time > panel.makespan) return null;
  const lane = Math.floor((y - place.lanesTop) / (place.laneHeight + place.laneGap));
  if (lane >= 0 && lane < panel.lanes.length) {
    const isFoot = y - place.laneY(lane) > place.laneHeight - 6;
    return atLane(panel, lane, time, { isFoot, slack: 2 / place.scale(view), options });
  }
  const device = Math.floor((y - place.memoryTop) / (place.stripHeight + place.stripGap));
  const isStrip = options.memory && device >= 0 && device < panel.memory.curves.length;
  return isStrip ? { what: "memory", device, time } : null;
}

function atLane(panel, number, time, { isFoot, slack, options }) {
  const lane = panel.lanes[number];
  if (isFoot) {
    const [low, high] = seen(lane.beside, time - slack, time + slack);
    for (let i = high - 1; i >= low; i--) {
      const index = lane.beside.op[i];
      const isHidden = options.look.kinds[lane.ops.kind[index]].message && !options.messages;
      if (!isHidden && lane.beside.end[i] > time - slack) return { what: "op", lane: number, index, time };
    }
  }
  const after = firstPlace(lane.work.op.length, (i) => lane.work.reach[i] > time);
  const isInside = after < lane.work.op.length && lane.work.start[after] <= time;
  if (isInside) return { what: "op", lane: number, index: lane.work.op[after], time };
  return { what: "idle", lane: number, after, time };
}

/** How long a lane stood still before an op. */
function idleBefore(lane, index) {
  const at = lane.work.op.indexOf(index);
  if (at < 0) return 0;
  return lane.work.start[at] - (at ? lane.work.end[at - 1] : 0);
}

/** The words for what was found: `{title, about, rows}`, each row a name and a value. */
function describe(found, panel, others, look, inView) {
  if (found.what === "memory") return describeMemory(found, panel, inView);
  if (found.what === "idle") return describeIdle(found, panel, look, inView);
  return describeOp(found, panel, others, look, inView);
}

function describeMemory({ device, time }, panel, inView) {
  const curve = panel.memory.curves[device];
  return {
    title: amountText(panel, amountAt(curve, time)),
    about: `${panel.memory.title}, device ${device}`,
    rows: [["at", instantText(time, inView)], ["peak", amountText(panel, curve.peak)]],
  };
}

/** What a lane waits for in a gap: the causes, the longest first, and for whom. */
function causesWithin(panel, lane, from, to, look) {
  const sums = new Map();
  for (const wait of panel.lanes[lane].waits) {
    const time = Math.min(to, wait.end) - Math.max(from, wait.start);
    if (time <= 0) continue;
    const text = causeText(panel, wait, look);
    sums.set(text, (sums.get(text) ?? 0) + time);
  }
  return [...sums].sort((a, b) => b[1] - a[1]);
}

/** "messages, d0 to d1" or "warm-up and drain, for d2". */
function causeText(panel, wait, look) {
  const name = look.causes[wait.cause];
  if (wait.on < 0) return name;
  const on = panel.lanes[wait.on];
  return wait.to < 0 ? `${name}, for ${on.label}` : `${name}, d${on.device} to d${wait.to}`;
}

function describeIdle(found, panel, look, inView) {
  const { ops, work, label } = panel.lanes[found.lane];
  const last = found.after - 1;
  const from = last >= 0 ? work.end[last] : 0;
  const to = found.after < work.op.length ? work.start[found.after] : panel.makespan;
  const name = (i) => opText(ops, work.op[i], look.kinds);
  const rows = [["from", instantText(from, inView)], ["for", timeText(to - from)]];
  if (last >= 0) rows.push(["after", name(last)]);
  if (found.after < work.op.length) rows.push(["before", name(found.after)]);
  const causes = causesWithin(panel, found.lane, from, to, look);
  for (const [cause, time] of causes.slice(0, 6)) rows.push([timeText(time), cause]);
  return { title: `${label} waits`, about: causes.length ? causes[0][0] : "bubble", rows };
}

function describeOp(found, panel, others, look, inView) {
  const lane = panel.lanes[found.lane], ops = lane.ops, i = found.index;
  const kind = look.kinds[ops.kind[i]];
  const duration = ops.end[i] - ops.start[i];
  const rows = [
    ["lane", lane.label],
    ["start", instantText(ops.start[i], inView)],
    ["duration", timeText(duration)],
  ];
  const idle = idleBefore(lane, i);
  if (idle > inView * 1e-9) rows.push(["waited", timeText(idle)]);
  for (const other of others) rows.push(compared(other, ops, i, duration));
  rows.push(...messageRows(found, panel));
  return { title: opText(ops, i, look.kinds), about: aboutOp(ops, i, kind, panel), rows: rows.filter(Boolean) };
}

function aboutOp(ops, i, kind, panel) {
  const net = panel.nets.length ? ` of ${panel.nets[ops.stage[i]]}` : "";
  const words = [kind.name, `stage ${ops.stage[i]}${net}`];
  if (ops.microbatch[i] >= 0) words.push(`microbatch ${ops.microbatch[i]}`);
  if (panel.steps[0].length > 1) words.push(`step ${ops.step[i]}`);
  return words.join(", ");
}

/** The same op in another panel. */
function compared(other, ops, i, duration) {
  const place = other.placeOf().get(opKey(ops, i));
  if (!place) return null;
  const theirs = other.lanes[place.lane].ops;
  const length = theirs.end[place.index] - theirs.start[place.index];
  const ratio = ratioText(length, duration);
  return [other.title, timeText(length) + (ratio ? ` (here ${ratio})` : "")];
}

function messageRows(found, panel) {
  const rows = [];
  for (const one of panel.transfersOf().get(`${found.lane}:${found.index}`) ?? []) {
    const isSent = sameOp(one.maker, found);
    const other = panel.lanes[(isSent ? one.reader : one.maker).lane].label;
    const size = one.bytes ? `, ${bytesText(one.bytes)}` : "";
    rows.push([isSent ? `to ${other}` : `from ${other}`, `${timeText(one.end - one.start)}${size}`]);
  }
  return rows;
}

/** Fill the tip and put it beside a point of the window. */
function showTip(tip, words, x, y) {
  const list = document.createElement("dl");
  for (const [name, value] of words.rows) {
    list.append(textElement("dt", name), textElement("dd", value));
  }
  tip.replaceChildren(textElement("b", words.title), textElement("p", words.about), list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  const top = Math.min(y + 16, innerHeight - height - 8);
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}

function textElement(name, text) {
  const element = document.createElement(name);
  element.textContent = text;
  return element;
}
