// The last requests, and the explanation of one of them.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { receipt as fetchReceipt } from "./api.js";
import { brief, called, clock, count, known, seconds, severalRanks, workerName } from "./format.js";
import { Empty, End, PromptBar, Verdict } from "./parts.js";
import { Receipt } from "./receipt.js";

const shortID = (id) => (id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id);
const addressOf = (id) => `#/requests/${encodeURIComponent(id)}`;
const routeName = (route) => route.replace(/^\/v1\//, "");

function Row({ entry, ranks, models, chosen }) {
  const open = (event) => {
    if (!event.target.closest("a")) location.hash = addressOf(entry.key);
  };
  const cell = (name, content, field, label) => html`<td role="cell" class=${`c-${name}`} data-field=${field} data-label=${label}>${content}</td>`;
  return html`<tr role="row" class=${chosen ? "chosen" : ""} data-request=${entry.id} data-key=${entry.key} onClick=${open}>
    ${cell("time", clock(entry.at))}
    ${cell("id", html`<a href=${addressOf(entry.key)} aria-current=${chosen ? "true" : undefined} title=${entry.id}>${shortID(entry.id)}</a><small>${routeName(entry.route)}</small>${entry.prompt && html`<span class="said">${entry.prompt}</span>`}`)}
    ${models && cell("model", entry.model)}
    ${cell("worker", html`<span class="chipw" title=${`worker ${entry.worker_name || (entry.worker ?? "–")}`}>${entry.prefill_worker !== null ? `${workerName(entry.prefill_worker, 0, false, entry.prefill_worker_name, 22)} → ` : ""}${workerName(entry.worker, entry.rank, ranks, entry.worker_name, 22)}</span>`, "worker")}
    ${cell("prompt num", entry.prompt_tokens > 0 ? count(entry.prompt_tokens) : "–", "prompt_tokens", "Prompt")}
    ${cell("bar", html`<${PromptBar} entry=${entry} />`)}
    ${cell("predicted num", count(entry.predicted), "predicted")}
    ${cell("cached num", count(entry.cached), "cached", "Cached")}
    ${cell("verdict", html`<${Verdict} entry=${entry} />`, undefined, "Prediction")}
    ${cell("ttft num", seconds(entry.ttft), "ttft", "First token")}
    ${cell("duration num", seconds(entry.duration), "duration")}
    ${cell("output num", count(entry.output_tokens), "output_tokens")}
    ${cell("end", html`<${End} entry=${entry} />`)}
  </tr>`;
}

const columns = [
  ["time", "Time"], ["id", "Request"], ["model", "Model"], ["worker", "Worker"], ["prompt num", "Prompt", "tokens"], ["bar", "Cached part"],
  ["predicted num", html`<i class="key predicted"></i>Predicted`, "tokens"], ["cached num", html`<i class="key accent"></i>Cached`, "tokens"], ["verdict", "Prediction"], ["ttft num", "First token"], ["duration num", "Total"],
  ["output num", "Output", "tokens"], ["end", "Result"],
];

// Aside fetches and shows the explanation of the request with that key or id, and fetches it again when the request has ended.
function Aside({ id, entry }) {
  const [got, setGot] = useState({ id: "", receipt: null, error: "" });
  const title = useRef(null);
  const end = entry?.end;
  useEffect(() => {
    const leave = new AbortController();
    fetchReceipt(id, leave.signal).then(
      (receipt) => setGot({ id, receipt, error: "" }),
      (failure) => failure.name !== "AbortError" && setGot((had) => (had.id === id && had.receipt ? had : { id, receipt: null, error: failure.status === 404 ? "gone" : failure.message })),
    );
    return () => leave.abort();
  }, [id, end]);
  useEffect(() => {
    title.current?.focus({ preventScroll: true });
  }, [id]);
  const close = () => {
    location.hash = "#/requests";
  };
  const fresh = got.id === id ? got : { receipt: null, error: "" };
  const receipt = fresh.receipt && { ...fresh.receipt, request: entry || fresh.receipt.request };
  const name = (entry || fresh.receipt?.request)?.id || id;
  return html`<aside class="panel" aria-labelledby="receipt-title" data-receipt=${id} onKeyDown=${(e) => e.key === "Escape" && close()}>
    <header><h2 id="receipt-title" tabindex="-1" ref=${title}>Explanation <code title=${name}>${shortID(name)}</code></h2>
      <button type="button" class="small" onClick=${close}>Close</button></header>
    ${!receipt && !fresh.error && html`<p class="quiet" role="status">Loading …</p>`}
    ${fresh.error === "gone" && html`<p>No explanation: it has been removed, or no dashboard was open at the time of the decision.</p>`}
    ${fresh.error && fresh.error !== "gone" && html`<p class="problem" role="alert">${fresh.error}</p>`}
    ${receipt && html`<${Receipt} receipt=${receipt} />`}
  </aside>`;
}

// Requests shows the list; id is the key or the id of the request whose explanation is open, or empty.
export function Requests({ state, id }) {
  const [frozen, setFrozen] = useState(null); // the list at the time of the pause
  const [worker, setWorker] = useState("");
  const [only, setOnly] = useState("");
  const live = state.requests || [];
  const list = frozen || live;
  const ranks = severalRanks(state.workers);
  const workers = [...new Map((state.workers || []).map((w) => [String(w.worker), called(w)]))];
  const models = (state.models || []).length > 1;
  const trouble = (entry) => ["failed", "refused", "cancelled"].includes(entry.end);
  const tests = {
    trouble,
    wrong: (entry) => known(entry.cached) && entry.cached !== entry.predicted,
    running: (entry) => entry.end === "running",
  };
  const shown = list.filter((entry) => (worker === "" || String(entry.worker) === worker || String(entry.prefill_worker) === worker) && (!only || tests[only](entry)));
  const named = (of) => of.find((one) => one.key === id) || of.find((one) => one.id === id);
  const entry = id && (named(live) || named(list));
  const open = entry ? entry.key : id;
  const title = useRef(null);
  const closed = useRef("");
  useEffect(() => { // the focused element closed with the explanation
    const row = closed.current && !open && [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === closed.current);
    if (closed.current && !open && document.activeElement === document.body) (row?.querySelector("a") || title.current).focus();
    closed.current = open;
  }, [open]);
  return html`<section aria-labelledby="title-requests" class=${"view requests" + (id ? " with-panel" : "")}>
    <div class="list">
      <div class="viewhead">
        <h2 id="title-requests" tabindex="-1" ref=${title}>Requests ${live.length > 0 && html`<span class="quiet num">the last ${count(live.length)}</span>`}</h2>
        <div class="tools" hidden=${live.length === 0}>
          <label for="by-worker" class="sr">Filter requests by worker</label>
          <select id="by-worker" value=${worker} onChange=${(e) => setWorker(e.target.value)}><option value="">All workers</option>${workers.map(([id, name]) => html`<option value=${id}>Worker ${brief(name)}</option>`)}</select>
          <label for="by-end" class="sr">Filter requests by result</label>
          <select id="by-end" value=${only} onChange=${(e) => setOnly(e.target.value)}><option value="">All results</option><option value="running">Running</option><option value="trouble">Failed or cancelled</option><option value="wrong">Prediction not exact</option></select>
          <button type="button" aria-pressed=${frozen !== null} onClick=${() => setFrozen(frozen ? null : live)}>${frozen ? "Resume" : "Pause"}</button>
        </div>
      </div>
      ${live.length === 0 && html`<${Empty} title="No requests yet"><p>Send one to the OpenAI port with <code>./ping.sh</code>, or from the view <a href="#/try">Try</a>. <code>--demo</code> generates traffic.</p></${Empty}>`}
      ${live.length > 0 && shown.length === 0 && html`<p class="quiet">None of the last ${count(list.length)} requests match.</p>`}
      ${shown.length > 0 && html`<div class="tablebox" role="region" aria-labelledby="title-requests" tabindex="0"><table role="table" class=${shown.some((one) => one.worker_name) ? "named" : undefined}>
        <thead role="rowgroup"><tr role="row">${columns.filter(([name]) => models || name !== "model").map(([name, text, unit]) => html`<th role="columnheader" scope="col" class=${`c-${name}`}>${text}${unit && html`<small>${unit}</small>`}</th>`)}</tr></thead>
        <tbody role="rowgroup">${shown.map((one) => html`<${Row} key=${one.key} entry=${one} ranks=${ranks} models=${models} chosen=${one.key === open} />`)}</tbody>
      </table></div>`}
    </div>
    ${id && html`<${Aside} id=${id} entry=${entry} />`}
  </section>`;
}
