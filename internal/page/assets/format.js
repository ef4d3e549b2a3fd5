// How numbers, times and names are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const none = "–";
const gap = "\u202f"; // narrow, and no line ends there

const digits = (value, places) =>
  new Intl.NumberFormat("en", { minimumFractionDigits: places, maximumFractionDigits: places }).format(value);

// known tells whether there is a number at all.
export const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : none);

// short writes large numbers with three figures: 12.3 k, 4.56 M.
export function short(value) {
  if (!known(value)) return none;
  for (const [from, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= from) {
      const scaled = value / (unit === "k" ? 1e3 : from);
      return digits(scaled, Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2) + gap + unit;
    }
  }
  return whole.format(value);
}

// percent writes a share from 0 to 1. What is not quite all never reads as 100 %.
export function percent(share) {
  if (!known(share)) return none;
  const value = share * 100;
  if (share < 1 && value >= 99.95) return `>99.9${gap}%`;
  return `${digits(value, value === 0 || value === 100 ? 0 : 1)}${gap}%`;
}

export const rate = (value) => (known(value) ? digits(value, value >= 100 ? 0 : value >= 10 ? 1 : 2) : none);

// level is a number of requests at a time: most often a whole one.
export const level = (value) => (Number.isInteger(value) ? count(value) : rate(value));

// seconds writes a latency.
export function seconds(value) {
  if (!known(value)) return none;
  const ms = value * 1000;
  if (ms > 0 && ms < 0.1) return `<0.1${gap}ms`;
  if (ms < 1000) return `${digits(ms, ms > 0 && ms < 10 ? 1 : 0)}${gap}ms`;
  return value < 100 ? `${digits(value, value < 10 ? 2 : 1)}${gap}s` : span(value);
}

// span writes how long something has lasted: its two largest units, or one.
export function span(value, one) {
  if (!known(value)) return none;
  const s = Math.max(0, Math.floor(value));
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, of]) => s >= of);
  if (first < 0) return `0${gap}s`;
  const [name, of] = units[first];
  const next = one ? undefined : units[first + 1];
  const more = next ? Math.floor((s % of) / next[1]) : 0;
  return `${Math.floor(s / of)}${gap}${name}` + (more ? ` ${more}${gap}${next[0]}` : "");
}

// signed writes a part of a score.
export function signed(value) {
  if (!known(value)) return none;
  const size = Math.abs(value);
  const text = size >= 1e5 ? short(size) : digits(size, size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
  return value < 0 ? `−${text}` : text;
}

const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dateFormat = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

// clock is the time of day, date all of it; both of Unix seconds.
export const clock = (at) => (known(at) ? clockFormat.format(at * 1000) : none);
export const date = (at) => (known(at) ? dateFormat.format(at * 1000) : none);

// brief cuts a long name in its middle: what tells Pods apart stands at the end.
export const brief = (name, most = 28) => (name.length > most ? `${name.slice(0, most - 13)}…${name.slice(-12)}` : name);

// workerName is how a worker, or its rank where workers have several, is called in a line of text: by its name if it has
// one, of which it shows so many characters, else by its id.
export function workerName(worker, rank, ranks, name, most) {
  if (worker === null || worker === undefined) return none;
  const called = name ? brief(name, most) : String(worker);
  return ranks ? `${called} / ${rank}` : called;
}

// called is all of that without the rank.
export const called = (w) => w.name || String(w.worker);

// byID sorts workers. Their ids are texts: not all of them are numbers that can be counted exactly here.
export const byID = (a, b) => a.localeCompare(b, "en", { numeric: true });

// severalRanks tells whether a rank says more than its worker.
export const severalRanks = (list) => (list || []).some((w) => (w.rank ?? w.dp_rank) > 0);

// words writes a name of the API's as people do.
export const words = (name) => String(name).replaceAll("_", " ");
