// The page's data, decoded: typed arrays in seconds, and what is found by binary search.

/** Running sums of gaps, times a scale. */
function summed(gaps, scale = 1) {
  const sums = new Float64Array(gaps.length);
  let sum = 0;
  for (let i = 0; i < gaps.length; i++) {
    sum += gaps[i];
    sums[i] = sum * scale;
  }
  return sums;
}

/** The first place from 0 to `count` for which `isReached` holds; it must stay true. */
function firstPlace(count, isReached) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isReached(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Ops of a lane by start time; `reach` is the latest end up to each. */
function spanList(ops, order) {
  order.sort((a, b) => ops.start[a] - ops.start[b] || a - b);
  const start = Float64Array.from(order, (i) => ops.start[i]);
  const end = Float64Array.from(order, (i) => ops.end[i]);
  const reach = Float64Array.from(end);
  for (let i = 1; i < reach.length; i++) reach[i] = Math.max(reach[i], reach[i - 1]);
  return { op: Int32Array.from(order), start, end, reach };
}

/** The range of a span list that may be seen between two times. */
function seen(list, from, to) {
  const low = firstPlace(list.op.length, (i) => list.reach[i] > from);
  const high = firstPlace(list.op.length, (i) => list.start[i] >= to);
  return [low, Math.max(low, high)];
}

function readLane(raw, kinds, tick) {
  const count = raw.kind.length;
  const start = new Float64Array(count), end = new Float64Array(count);
  let last = 0;
  for (let i = 0; i < count; i++) {
    start[i] = (last + raw.gap[i]) * tick;
    last += raw.gap[i] + raw.duration[i];
    end[i] = last * tick;
  }
  const ops = {
    start,
    end,
    kind: Uint8Array.from(raw.kind),
    stage: Int32Array.from(raw.stage),
    microbatch: Int32Array.from(raw.microbatch),
    step: Int32Array.from(summed(raw.step)),
  };
  const all = [...ops.kind.keys()];
  return {
    label: raw.label,
    device: raw.device,
    bubble: raw.bubble,
    ops,
    waits: readWaits(raw.waits, tick),
    work: spanList(ops, all.filter((i) => !kinds[ops.kind[i]].beside)),
    beside: spanList(ops, all.filter((i) => kinds[ops.kind[i]].beside)),
  };
}

/** Idle time by cause: `on` is the lane that is waited for, `to` where a message goes. */
function readWaits(raw, tick) {
  let last = 0;
  return raw.cause.map((cause, i) => {
    const start = (last + raw.gap[i]) * tick;
    last += raw.gap[i] + raw.duration[i];
    return { start, end: last * tick, cause, on: raw.on[i], to: raw.to[i] };
  });
}

/** The critical path: what each segment is, on which lane, from when to when. */
function readPath(raw, tick) {
  const ends = summed(raw.duration, tick);
  return raw.part.map((part, i) => ({
    part,
    lane: raw.lane[i],
    to: raw.to[i],
    start: raw.begin * tick + (i ? ends[i - 1] : 0),
    end: raw.begin * tick + ends[i],
  }));
}

/** Messages between an op that made a value and one that waited for it. */
function readTransfers(raw, tick) {
  return raw.start.map((start, i) => ({
    maker: { lane: raw.maker[2 * i], index: raw.maker[2 * i + 1] },
    reader: { lane: raw.reader[2 * i], index: raw.reader[2 * i + 1] },
    start: start * tick,
    end: raw.end[i] * tick,
    bytes: raw.bytes[i],
  }));
}

function readPanel(raw, kinds) {
  const panel = {
    title: raw.title,
    nets: raw.nets,
    tones: raw.tones,
    makespan: raw.makespan * raw.tick,
    lanes: raw.lanes.map((lane) => readLane(lane, kinds, raw.tick)),
    steps: raw.steps.map((ends) => summed(ends, raw.tick)),
    transfers: readTransfers(raw.transfers, raw.tick),
    path: readPath(raw.path, raw.tick),
    memory: {
      title: raw.memory.title,
      isBytes: raw.memory.isBytes,
      curves: raw.memory.curves.map((curve) => ({
        peak: curve.peak,
        time: summed(curve.time, raw.tick),
        amount: Float64Array.from(curve.amount),
      })),
    },
  };
  panel.meanDuration = meanDuration(panel.lanes);
  panel.transfersOf = onFirstUse(() => indexTransfers(panel));
  panel.placeOf = onFirstUse(() => indexOps(panel));
  return panel;
}

/** The mean duration of the ops that take any time and keep their lane busy. */
function meanDuration(lanes) {
  let sum = 0, count = 0;
  for (const { work } of lanes) {
    work.end.forEach((end, i) => {
      sum += end - work.start[i];
      count += end > work.start[i];
    });
  }
  return count ? sum / count : 0;
}

/** A function that works once and remembers. */
function onFirstUse(work) {
  let result;
  return () => (result ??= work());
}

function indexTransfers(panel) {
  const index = new Map();
  for (const transfer of panel.transfers) {
    for (const { lane, index: op } of [transfer.maker, transfer.reader]) {
      const key = lane + ":" + op;
      if (!index.has(key)) index.set(key, []);
      index.get(key).push(transfer);
    }
  }
  return index;
}

/** An op's identity, which it has in every panel. */
function opKey(ops, i) {
  return `${ops.kind[i]} ${ops.stage[i]} ${ops.microbatch[i]} ${ops.step[i]}`;
}

function indexOps(panel) {
  const index = new Map();
  panel.lanes.forEach((lane, number) => {
    for (let i = 0; i < lane.ops.kind.length; i++) index.set(opKey(lane.ops, i), { lane: number, index: i });
  });
  return index;
}

/** How much there is at a time, on a curve of steps. */
function amountAt(curve, time) {
  const after = firstPlace(curve.time.length, (i) => curve.time[i] > time);
  return after ? curve.amount[after - 1] : 0;
}
