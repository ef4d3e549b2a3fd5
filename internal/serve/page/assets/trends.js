// The last hour as small charts that share their time axis and cursor.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { brief, byID, clock, known, level, percent, rate, seconds, short } from "./format.js";
import { Empty } from "./parts.js";

// The charts: each has one or more series and a format for its values.
const charts = [
  { title: "Requests", unit: "per second", write: rate, lines: [["requests_per_second", "all"]] },
  { title: "Time to first token", unit: "", write: seconds, lines: [["ttft_p50", "p50"], ["ttft_p99", "p99"]] },
  { title: "Inter-token latency", unit: "", write: seconds, lines: [["itl_p50", "p50"], ["itl_p99", "p99"]] },
  { title: "Hit rate", unit: "of prompt tokens", write: percent, most: 1, lines: [["hit_rate", "cached"]] },
  { title: "Exact predictions", unit: "of compared answers", write: percent, most: 1, lines: [["exact", "exact"]] },
  { title: "Router queue", unit: "requests", write: level, lines: [["queued", "waiting"]] },
  { title: "In flight", unit: "requests by worker", write: level, each: "in_flight" },
];

const shortest = 300; // s; minimum time range

const mostLines = 8; // the number of colours

// extremes returns the minimum, the mean and the maximum of many series at each time.
function extremes(lists) {
  const at = (pick) => lists[0].map((_, i) => {
    const seen = lists.map((list) => list[i]).filter(known);
    return seen.length > 0 ? pick(seen) : null;
  });
  const mean = (seen) => seen.reduce((sum, value) => sum + value, 0) / seen.length;
  return [["highest", at((seen) => Math.max(...seen))], ["mean", at(mean)], ["lowest", at((seen) => Math.min(...seen))]];
}

// linesOf lists the series of a chart: label and values.
function linesOf(chart, series) {
  if (!chart.each) return chart.lines.map(([key, label]) => [label, series[key] || []]);
  const workers = series[chart.each] || {};
  if (Object.keys(workers).length > mostLines) return extremes(Object.values(workers));
  return Object.keys(workers).sort(byID).map((id) => [`worker ${brief(id)}`, workers[id]]);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lineColour = (i, of) => colour(of > 1 ? `--t${i % 8}` : "--accent");

// useDark follows the browser's colour scheme, because a canvas does not.
function useDark() {
  const query = useMemo(() => matchMedia("(prefers-color-scheme: dark)"), []);
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const heard = () => setDark(query.matches);
    query.addEventListener("change", heard);
    return () => query.removeEventListener("change", heard);
  }, []);
  return dark;
}

function options(chart, lines, width, onCursor) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const pad = (value) => String(value).padStart(2, "0");
  return {
    width,
    height: 150,
    padding: [8, 20, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "trends" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: true, range: (_, low, high) => [Math.min(low, high - shortest), high] }, y: { range: (_, low, high) => [0, chart.most || (high > 0 ? high * 1.1 : 1)] } },
    axes: [
      { ...axis, space: 60, size: 26, incrs: [60, 120, 300, 600, 900, 1800, 3600], values: (_, marks) => marks.map((at) => { const d = new Date(at * 1000); return `${pad(d.getHours())}:${pad(d.getMinutes())}`; }) },
      { ...axis, size: 58, space: 32, values: (_, marks) => marks.map((mark) => chart.write(mark).replace(/\.0+(?=\D|$)/, "").replace(/(\.\d*?[1-9])0+(?=\D|$)/, "$1")) },
    ],
    series: [{}, ...lines.map(([label], i) => ({ label, stroke: lineColour(i, lines.length), width: 1.5, points: { show: false }, fill: lines.length === 1 ? colour("--accent-faint") : undefined }))],
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
  };
}

const lastKnown = (values) => values.findLast(known) ?? null;

function Chart({ chart, trends, dark }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const lines = linesOf(chart, trends.series);
  const times = (lines[0]?.[1] || []).map((_, i) => trends.from + i * trends.step);
  const data = [times, ...lines.map(([, values]) => values)];
  const names = lines.map(([label]) => label).join();
  useEffect(() => {
    const element = box.current;
    plot.current = new window.uPlot(options(chart, lines, Math.max(120, element.clientWidth), setAt), data, element);
    const observer = new ResizeObserver(() => element.clientWidth > 0 && plot.current.setSize({ width: element.clientWidth, height: 150 }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [dark, names]);
  useEffect(() => {
    plot.current.setData(data);
  }, [trends]);
  const shown = (values) => chart.write(at === null ? lastKnown(values) : values[at]);
  const values = lines.map(([label, values]) => `${label} ${chart.write(lastKnown(values))}`).join(", ");
  return html`<figure class=${"chart" + (chart.each ? " is-wide" : "")} data-chart=${chart.title}>
    <figcaption><h3>${chart.title} <span class="quiet">${chart.unit}</span></h3>
      <ul class="keys">${lines.map(([label, values], i) => html`<li><i class=${lines.length > 1 ? `key t${i % 8}` : "key accent"}></i>${label} <span class="num">${shown(values)}</span></li>`)}</ul></figcaption>
    <div ref=${box} class="plot" role="img" aria-label=${`${chart.title}, now: ${values}`}></div>
    ${at !== null && times[at] !== undefined && html`<p class="cursorat num" aria-hidden="true">${clock(times[at])}</p>`}
  </figure>`;
}

// Trends shows the charts once the stream has sent their data.
export function Trends({ trends }) {
  const dark = useDark();
  const some = trends && linesOf(charts[0], trends.series)[0][1].length > 1;
  return html`<section aria-labelledby="title-trends" class="view">
    <div class="viewhead"><h2 id="title-trends">Trends <span class="quiet">the last hour, one point every ${trends ? short(trends.step) : 10} s</span></h2></div>
    ${!some && html`<${Empty} title="No trends yet"><p>A point is added every 10 s after the start of the router. A line needs two points.</p></${Empty}>`}
    ${some && html`<div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} trends=${trends} dark=${dark} />`)}</div>`}
  </section>`;
}
