// Formats numbers, times and names.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const none = "–";
const gap = "\u202f"; // narrow no-break space

const digits = (value, places) =>
  new Intl.NumberFormat("en", { minimumFractionDigits: places, maximumFractionDigits: places }).format(value);

// known returns whether value is a finite number.
export const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : none);

// short formats large numbers with three significant digits: 12.3 k, 4.56 M.
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

// percent formats a share from 0 to 1. A share below 1 is never rounded to 100 %.
export function percent(share) {
  if (!known(share)) return none;
  const value = share * 100;
  if (share < 1 && value >= 99.95) return `>99.9${gap}%`;
  return `${digits(value, value === 0 || value === 100 ? 0 : 1)}${gap}%`;
}

export const rate = (value) => (known(value) ? digits(value, value >= 100 ? 0 : value >= 10 ? 1 : 2) : none);

// level formats a number of concurrent requests, usually an integer.
export const level = (value) => (Number.isInteger(value) ? count(value) : rate(value));

// seconds formats a latency.
export function seconds(value) {
  if (!known(value)) return none;
  const ms = value * 1000;
  if (ms > 0 && ms < 0.1) return `<0.1${gap}ms`;
  if (ms < 1000) return `${digits(ms, ms > 0 && ms < 10 ? 1 : 0)}${gap}ms`;
  return value < 100 ? `${digits(value, value < 10 ? 2 : 1)}${gap}s` : span(value);
}

// span formats a duration with its two largest units, or one.
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

// signed formats a term of a score.
export function signed(value) {
  if (!known(value)) return none;
  const size = Math.abs(value);
  const text = size >= 1e5 ? short(size) : digits(size, size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
  return value < 0 ? `−${text}` : text;
}

const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dateFormat = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

// clock formats the time of day, date the date and time; both take Unix seconds.
export const clock = (at) => (known(at) ? clockFormat.format(at * 1000) : none);
export const date = (at) => (known(at) ? dateFormat.format(at * 1000) : none);

// brief shortens a long name in the middle, because the names of Pods differ at the end.
export const brief = (name, most = 28) => (name.length > most ? `${name.slice(0, most - 13)}…${name.slice(-12)}` : name);

// workerName is the label of a worker, with its rank if workers have several: its name, shortened to most characters, else
// its id.
export function workerName(worker, rank, ranks, name, most) {
  if (worker === null || worker === undefined) return none;
  const called = name ? brief(name, most) : String(worker);
  return ranks ? `${called} / ${rank}` : called;
}

// called is the full name or id, without the rank.
export const called = (w) => w.name || String(w.worker);

// byID sorts workers by id. Ids are strings, because JavaScript cannot represent all of them as numbers.
export const byID = (a, b) => a.localeCompare(b, "en", { numeric: true });

// severalRanks returns whether workers have more than one rank.
export const severalRanks = (list) => (list || []).some((w) => (w.rank ?? w.dp_rank) > 0);

// words converts an API name to text.
export const words = (name) => String(name).replaceAll("_", " ");
