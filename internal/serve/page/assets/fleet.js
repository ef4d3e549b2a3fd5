// The fleet view: a card for each worker, or for each of its ranks.
import { html, useRef, useState } from "./vendor/preact-htm.js";
import { act } from "./api.js";
import { Cluster } from "./cluster.js";
import { called, count, known, percent, seconds, severalRanks, short, span, workerName } from "./format.js";
import { Confirm, Empty, Fact, Meter } from "./parts.js";

// The states, those that need attention first.
const states = ["down", "unhealthy", "ejected", "cordoned", "draining", "not-ready", "paused", "starting", "ready"];
const stateNames = { down: "Down", unhealthy: "Unhealthy", ejected: "Ejected", cordoned: "Cordoned", draining: "Draining", "not-ready": "Not ready", paused: "Paused", starting: "Starting", ready: "Ready" };

// How the KV cache of a worker is known.
const knownNames = { exact: "exact", approximate: "approximate", load_only: "load only" };

// Cards of a group that are drawn at first, and that each click adds: thousands would be drawn anew every second.
const atOnce = 96;

const isUp = (w) => ["ready", "ejected", "cordoned", "draining", "not-ready", "paused"].includes(w.state);

// Actions on a worker, for all its ranks.
const actions = {
  drain: {
    name: "Drain",
    ask: (w) => `Drain worker ${called(w)}?`,
    text: (w) => `It gets no new requests until you readmit it. ${w.in_flight === 1 ? "The in-flight request finishes" : `The ${count(w.in_flight)} in-flight requests finish`}.`,
    done: (w) => `Worker ${called(w)} is cordoned and gets no new requests.`,
  },
  readmit: {
    name: "Readmit",
    ask: (w) => `Readmit worker ${called(w)}?`,
    text: (w) => (isUp(w) ? "It gets requests again immediately. A cordon or an ejection ends." : "It gets requests again once it is ready."),
    done: (w) => `Worker ${called(w)} gets requests again${isUp(w) ? "" : " once it is ready"}.`,
  },
  "reset-cache": {
    name: "Reset cache",
    ask: (w) => `Reset the prefix cache of worker ${called(w)}?`,
    text: (w) => `The engine clears its prefix cache${known(w.blocks) ? ` (${count(w.blocks)} blocks in the index)` : ""}. The next prompts are computed in full.`,
    done: (w) => `Worker ${called(w)} was asked to reset its prefix cache.`,
  },
};

// offered lists the actions available for a worker: a worker that is not up can only be readmitted, a draining one cannot be drained.
const offered = (w) => [w.cordoned || w.state === "ejected" ? "readmit" : isUp(w) && w.state !== "draining" && "drain", isUp(w) && "reset-cache"].filter(Boolean);

// allRanks is a worker with the sums of its ranks.
function allRanks(w, workers) {
  const sum = (field) => workers.filter((one) => one.worker === w.worker).reduce((all, one) => all + one[field], 0);
  return { ...w, in_flight: sum("in_flight"), blocks: sum("blocks") };
}

function Card({ worker: w, now, ranks, models, onAct }) {
  const usage = known(w.kv_usage) ? percent(w.kv_usage) : w.load_known === false ? "not reported" : "–";
  const notes = [
    w.cordoned && w.state !== "cordoned" && ["cordoned", "It gets no new requests until it is readmitted"],
    w.load_known === false && w.state === "ready" && ["load unknown", "It has not published its load recently"],
  ].filter(Boolean);
  return html`<article class=${`card state-${w.state}`} data-worker=${w.worker} data-rank=${w.rank} aria-label=${`Worker ${workerName(w.worker, w.rank, ranks, w.name, 300)}`}>
    <header>
      <h3 title=${w.name && `${w.name}, id ${w.worker}`}>${!w.name && "Worker "}${workerName(w.worker, w.rank, ranks, w.name)}</h3>
      ${w.role && html`<span class="badge">${w.role}</span>`}
      ${w.known && html`<span class=${`badge${w.known === "exact" ? "" : " is-note"}`} data-field="known" title=${w.known_why || "Its KV events report all of its cached blocks"}>${knownNames[w.known] || w.known}</span>`}
      ${w.weight_version && html`<span class="badge" title="Version of its weights">weights ${w.weight_version}</span>`}
      ${notes.map(([text, title]) => html`<span class="badge is-note" title=${title}>${text}</span>`)}
      <span class="state"><i class="dot" aria-hidden="true"></i><span data-field="state">${stateNames[w.state] || w.state}</span>
        <span class="quiet">${span(now - w.since)}</span></span>
    </header>
    ${w.why && html`<p class="why" data-field="why">${w.why}</p>`}
    <p class="where"><span title=${w.url}>${w.url}</span>${(models > 1 || w.model) && html` · <span title=${w.model}>${w.model}</span>`} · ${w.engine}</p>
    <${Meter} name="KV cache usage" field="kv_usage" share=${w.kv_usage} text=${usage} />
    <dl class="facts">
      <${Fact} name="In flight" field="in_flight" value=${count(w.in_flight)} title="Requests that have not finished, of all routers of a cluster" />
      <${Fact} name="Waiting" field="waiting" value=${count(w.waiting)} title="Requests in the worker's own queue, as published by the worker" />
      <${Fact} name="Hit rate" field="hit_rate" value=${percent(w.hit_rate)} title="Share of prompt tokens that were cached" />
      <${Fact} name="Indexed blocks" field="blocks" value=${short(w.blocks)} title=${`${count(w.blocks)} blocks${w.block_size ? ` of ${count(w.block_size)} tokens` : ""} in the router's index`} />
      <${Fact} name="Prefilling" field="prefill_tokens" value=${html`${short(w.prefill_tokens)}<small>tok</small>`} title="Uncached prompt tokens still to compute" />
      <${Fact} name="Requests" field="requests" value=${short(w.requests)} title=${`${count(w.requests)} finished`} />
      <${Fact} name="Restarts" field="restarts" value=${count(w.restarts)} tone=${w.restarts > 0 ? "off" : ""} />
      <${Fact} name="Event lag" field="event_lag" value=${seconds(w.event_lag)} title="Time from the engine's time stamp of a KV event to its indexing" />
      <${Fact} name="Active blocks" field="active_blocks" value=${short(w.active_blocks)} title="Blocks of in-flight requests" />
    </dl>
    <footer>${offered(w).map((name) => html`<button type="button" class="small" onClick=${() => onAct(w, name)}>${actions[name].name}<span class="sr"> worker ${called(w)}</span></button>`)}</footer>
  </article>`;
}

// Fleet shows all workers. say shows a message about a completed action.
export function Fleet({ state, say }) {
  const [only, setOnly] = useState("");
  const [find, setFind] = useState("");
  const [most, setMost] = useState(atOnce);
  const [asked, setAsked] = useState(null); // {worker, action, busy, error}
  const title = useRef(null);
  const workers = state.workers || [];
  const ranks = severalRanks(workers);
  const counts = states.map((name) => [name, workers.filter((w) => w.state === name).length]).filter(([, n]) => n > 0);
  const shown = workers.filter((w) => (!only || w.state === only) && (!find || `${w.worker} ${w.name || ""} ${w.url} ${w.model} ${w.role}`.toLowerCase().includes(find.toLowerCase())));

  async function run() {
    const { worker, action } = asked;
    setAsked({ ...asked, busy: true, error: "" });
    try {
      await act(worker.worker, action);
      setAsked(null);
      say(actions[action].done(worker));
    } catch (failure) {
      setAsked({ worker, action, busy: false, error: failure.message });
    }
  }

  const groups = ["prefill", "decode", ""].map((role) => [role, shown.filter((w) => (w.role || "") === role)]).filter(([, list]) => list.length > 0);
  const titles = { prefill: "Prefill", decode: "Decode", "": groups.length > 1 ? "Aggregated" : "" };
  return html`<section aria-labelledby="title-fleet" class="view">
    <div class="viewhead">
      <h2 id="title-fleet" tabindex="-1" ref=${title}>Fleet <span class="quiet num">${count(workers.length)} ${ranks ? "ranks" : workers.length === 1 ? "worker" : "workers"}</span></h2>
      <div class="tools">
        ${counts.length > 1 && html`<div class="chips" role="group" aria-label="Filter workers by state">
          ${counts.map(([name, n]) => html`<button type="button" class=${`chip state-${name}`} aria-pressed=${only === name} onClick=${() => setOnly(only === name ? "" : name)}><i class="dot" aria-hidden="true"></i>${n} ${stateNames[name].toLowerCase()}</button>`)}
        </div>`}
        ${workers.length > 12 && html`<label class="sr" for="find-worker">Find a worker</label><input id="find-worker" type="search" placeholder="Find a worker" value=${find} onInput=${(e) => setFind(e.target.value)} />`}
      </div>
    </div>
    ${state.cluster && html`<${Cluster} cluster=${state.cluster} now=${state.at} />`}
    ${workers.length === 0 && html`<${Empty} title="No workers yet"><p>Start workers with <code>--num-workers 2</code>, attach running ones with <code>--worker url=http://host:8100</code>, or register them with <code>POST /workers</code> on the router port.</p></${Empty}>`}
    ${workers.length > 0 && shown.length === 0 && html`<p class="quiet">No worker matches. <button type="button" class="small" onClick=${() => { setOnly(""); setFind(""); title.current.focus(); }}>Show all</button></p>`}
    ${groups.map(([role, list]) => html`<div key=${role}>${titles[role] && html`<h3 class="group">${titles[role]} <span class="quiet num">${count(list.length)}</span></h3>`}
      <div class="cards">${list.slice(0, most).map((w) => html`<${Card} key=${`${w.worker}/${w.rank}`} worker=${w} now=${state.at} ranks=${ranks} models=${(state.models || []).length}
        onAct=${(worker, action) => setAsked({ worker: allRanks(worker, workers), action, busy: false, error: "" })} />`)}</div>
      ${list.length > most && html`<p class="quiet more"><button type="button" class="small" data-action="more" onClick=${() => setMost(most + atOnce)}>Show ${count(Math.min(atOnce, list.length - most))} more</button> ${count(list.length - most)} not shown</p>`}</div>`)}
    ${asked && html`<${Confirm} title=${actions[asked.action].ask(asked.worker)} text=${actions[asked.action].text(asked.worker)} action=${actions[asked.action].name}
      busy=${asked.busy} error=${asked.error} onYes=${run} onNo=${() => setAsked(null)} />`}
  </section>`;
}
