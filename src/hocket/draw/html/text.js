// Numbers as people read them, the way hocket/draw/quantity.py writes them.

const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const BYTE_UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

/** The unit in which amounts up to `most` read best: `[name, size]`. */
function unitFor(most, units) {
  return units.find(([, size]) => most >= size) ?? units[units.length - 1];
}

/** Four digits at most after leading zeros, and no trailing zeros. */
function short(number) {
  if (number === 0) return "0";
  const decimals = Math.max(0, 3 - Math.floor(Math.log10(Math.abs(number))));
  return number.toLocaleString("en", { maximumFractionDigits: Math.min(decimals, 12) });
}

function inUnits(amount, units) {
  if (amount === 0) return `0 ${units.find(([, size]) => size === 1)[0]}`;
  const [name, size] = unitFor(Math.abs(amount), units);
  return `${short(amount / size)} ${name}`;
}

const timeText = (time) => inUnits(time, TIME_UNITS);
const bytesText = (bytes) => inUnits(bytes, BYTE_UNITS);

/** A point in time, exact to a thousandth of what is in view. */
function instantText(time, inView) {
  const [name, size] = unitFor(Math.max(Math.abs(time), inView / 100), TIME_UNITS);
  const decimals = Math.ceil(-Math.log10(inView / size / 2000));
  return `${(time / size).toFixed(Math.min(9, Math.max(0, decimals)))} ${name}`;
}

function percentText(share) {
  const text = (100 * share).toFixed(1);
  return Number(text) === 0 ? "0 %" : `${text} %`;
}

/** How a number compares with another: "+3.1 %". */
function ratioText(first, second) {
  if (!first) return "";
  const text = (100 * (second / first - 1)).toFixed(1);
  if (Number(text) === 0) return "same";
  return `${text.startsWith("-") ? "−" + text.slice(1) : "+" + text} %`;
}

/** Round numbers between two others, at most `most`, and the gap between them. */
function ticksBetween(from, to, most) {
  const raw = (to - from) / Math.max(1, most);
  if (!(raw > 0)) return { gap: 1, marks: [from] };
  const power = 10 ** Math.floor(Math.log10(raw));
  const gap = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
  const marks = [];
  for (let i = Math.ceil(from / gap - 1e-9); i * gap <= to * (1 + 1e-12); i++) marks.push(i * gap);
  return { gap, marks };
}

/** A number with the decimals that tell neighbours apart which are `gap` apart. */
function tickText(number, gap) {
  const decimals = Math.max(0, -Math.floor(Math.log10(gap) + 1e-9));
  return number.toFixed(Math.min(12, decimals));
}
