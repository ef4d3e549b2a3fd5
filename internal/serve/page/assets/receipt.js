// The explanation of a decision: every candidate with every term of its score.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { byID, count, date, known, percent, seconds, severalRanks, signed, words, workerName } from "./format.js";
import { cachedShare, End, Fact, PromptBar, Verdict } from "./parts.js";

// Short descriptions of the policies' terms; see docs/routing.md.
const meanings = {
  first_token: "time to this request's first token",
  copy: "compute time that later requests save, because the blocks are then cached",
  pushed: "delay of the first tokens of earlier requests that share a pass with this one",
  foreign: "wait for queued requests of other clients of the worker",
  later: "delay of requests that arrive before the queue is empty",
  decode: "slowdown of this answer by the context on the worker",
  others: "pause of in-flight requests while the prompt is computed",
  slower: "slowdown of their decoding by this prompt",
  adapter: "loading the LoRA adapter, and the wait for a slot",
  prefill: "uncached blocks to compute",
  requests: "in-flight requests",
  overlap: "cached share of the prompt",
  kv_usage: "KV cache usage",
  waiting: "requests in the worker's queue",
  match: "cached blocks of the prompt",
  in_flight: "in-flight requests",
  failures: "recent failures",
  linear: "learned value for similar requests",
  mean: "sampled value learned for the worker",
  stay: "benefit of staying with the worker, or cost of switching",
  load: "penalty for load",
  turns: "turns until the worker is next",
};

const excluded = {
  pinned: "the request names another worker",
  cordoned: "it is cordoned",
  unanswered: "its URL has never answered",
  leg: "its role does not serve this leg",
  kind: "its KV connector does not match the other worker",
  model: "it does not serve the model",
  engine: "it does not run SGLang",
  not_allowed: "the request does not allow it",
  failed_this_request: "it has already failed this request",
  busy: "it exceeds a busy threshold",
  paused: "a trainer has paused its engine",
  version: "the request does not take the version of its weights",
  ejected: "it is ejected after failures",
  silent: "it shows no sign of life",
  held: "it requested a pause, or may be misconfigured",
  session: "the session is bound to another worker",
  trial: "an ejected worker gets this request on trial",
  slow_start: "it is in slow start",
  no_seat: "its engine runs as many requests as it can",
  objective: "it is predicted to miss an objective that others keep",
  failing: "it fails more than the others",
  queue_limit: "its queue is too long",
  not_drawn: "it was not drawn at random",
};

// whyNot is the reason why a candidate was excluded. Discovery can cordon workers as well.
const whyNot = (c) => (c.excluded === "cordoned" && c.worker_name ? "it is cordoned, draining or not ready" : excluded[c.excluded] || words(c.excluded));

// unitOf is the unit of a policy's totals.
function unitOf(receipt) {
  const units = { work: "ms", kv: "blocks", "least-loaded": "requests", "power-of-two": "requests", "round-robin": "turns" };
  if (receipt.rule === "longest match") return "blocks";
  return units[receipt.policy] || "";
}

const weighed = (c) => Array.isArray(c.terms) && !c.excluded;
const isChosen = (receipt) => (c) => c.worker_id === receipt.worker_id && c.dp_rank === receipt.dp_rank;

// ordered puts the chosen candidate first, then the others by total, then the excluded ones.
function ordered(receipt) {
  const chosen = isChosen(receipt);
  const key = (c) => (chosen(c) ? 2 : weighed(c) ? 1 : 0);
  return [...(receipt.candidates || [])].sort((a, b) => key(b) - key(a) || (b.total ?? 0) - (a.total ?? 0) || byID(a.worker_id, b.worker_id) || a.dp_rank - b.dp_rank);
}

// secondOf is the best eligible other candidate: as reported by the router, else by the totals.
function secondOf(receipt, list) {
  if (receipt.second) return list.find((c) => c.worker_id === receipt.second.worker_id && c.dp_rank === receipt.second.dp_rank) || null;
  return list.length > 1 && weighed(list[1]) ? list[1] : null;
}

// scaleOf finds the non-zero terms, in one order for all candidates, and the space of their bars on both sides of zero.
// If all totals are costs, the bars are mirrored and grow to the right.
function scaleOf(list) {
  const names = [];
  const counts = new Set();
  let low = 0;
  let high = 0;
  for (const c of list.filter((one) => Array.isArray(one.terms))) {
    let down = 0;
    let up = 0;
    for (const { name, value } of c.terms) {
      if (!names.includes(name)) names.push(name);
      if (value !== 0) counts.add(name);
      if (value < 0) down += value;
      else up += value;
    }
    low = Math.min(low, down);
    high = Math.max(high, up);
  }
  const turned = list.every((c) => !weighed(c) || c.total <= 0) && low < 0;
  const reach = high - low || 1;
  return {
    names: names.filter((name) => counts.has(name)),
    zero: names.filter((name) => !counts.has(name)),
    origin: (turned ? high : -low) / reach,
    of: (value) => (turned ? -value : value) / reach,
  };
}

// TermBars stacks the terms of one candidate on both sides of zero and marks their sum.
function TermBars({ terms, total, scale }) {
  let right = scale.origin;
  let left = scale.origin;
  const bars = terms.filter((term) => term.value !== 0).map((term) => {
    const size = scale.of(term.value);
    const from = size >= 0 ? right : left + size;
    if (size >= 0) right += size;
    else left += size;
    return html`<div class=${`term t${scale.names.indexOf(term.name) % 8}`} title=${`${words(term.name)} ${signed(term.value)}`}
      style=${{ left: `${from * 100}%`, width: `${Math.abs(size) * 100}%` }}></div>`;
  });
  return html`<div class="termbars" aria-hidden="true">${bars}<div class="zero" style=${{ left: `${scale.origin * 100}%` }}></div>
    <div class="sum" style=${{ left: `${(scale.origin + scale.of(total)) * 100}%` }}></div></div>`;
}

// limited says which KV-cache group of the worker ends its match.
const limited = (c) => (known(c.limited_by_group) ? ` (${count(c.held_blocks)} held, limited by cache group ${c.limited_by_group})` : "");

function Candidate({ c, receipt, scale, second, ranks, unit }) {
  const chosen = isChosen(receipt)(c);
  const name = (c.worker_name ? "" : "Worker ") + workerName(c.worker_id, c.dp_rank, ranks, c.worker_name);
  const mark = chosen ? html`<span class="badge is-chosen">chosen</span>` : second ? html`<span class="badge">second</span>` : null;
  return html`<li class=${"candidate" + (chosen ? " chosen" : "") + (c.excluded && !chosen ? " excluded" : "")} tabindex="-1" data-candidate=${`${c.worker_id}/${c.dp_rank}`}>
    <div class="line"><strong title=${c.worker_name}>${name}</strong>${mark}
      ${known(c.total) && html`<span class="total num"><span data-field="total">${signed(c.total)}</span> <span class="unit">${unit}</span></span>`}</div>
    ${Array.isArray(c.terms) && c.terms.length > 0 && html`<${TermBars} terms=${c.terms} total=${c.total} scale=${scale} />
      <ul class="terms">${c.terms.filter((term) => term.value !== 0).map((term) => html`<li><i class=${`key t${scale.names.indexOf(term.name) % 8}`}></i>${words(term.name)} <span class="num">${signed(term.value)}</span></li>`)}</ul>`}
    ${c.excluded && !chosen && html`<p class="why">Not chosen: ${whyNot(c)}.</p>`}
    <p class="knew">${count(c.overlap_blocks)} of ${count(receipt.blocks)} blocks cached${limited(c)} · ${count(c.in_flight)} in flight
      · ${count(c.prefill_tokens)} tokens to prefill${known(c.waiting) ? ` · ${count(c.waiting)} waiting` : ""}${known(c.kv_usage) ? ` · KV cache ${percent(c.kv_usage)}` : ""}${known(c.chance) ? ` · chance ${percent(c.chance)}` : ""}</p>
  </li>`;
}

// Summary describes the choice and its reason in one sentence.
function Summary({ receipt, second, ranks, unit, dry }) {
  const who = html`<strong title=${receipt.worker_name}>worker ${workerName(receipt.worker_id, receipt.dp_rank, ranks, receipt.worker_name)}</strong>`;
  if (receipt.error || receipt.worker_id === null || receipt.worker_id === undefined) {
    return html`<p class="summary">No worker was eligible${receipt.error ? `: ${receipt.error}` : ""}.</p>`;
  }
  const other = second && html` over worker ${workerName(second.worker_id, second.dp_rank, ranks, second.worker_name)}`;
  let how = html`: the only eligible worker`;
  if (receipt.how === "draw") how = html` by a random draw${known(receipt.margin) ? html`; its total differs by <span class="num" data-field="margin">${signed(receipt.margin)}</span> from the best other candidate` : ""}`;
  else if (receipt.ties > 1) how = html`, chosen at random from ${receipt.ties} equal candidates`;
  else if (known(receipt.margin)) how = html` by <strong class="num"><span data-field="margin">${signed(receipt.margin)}</span>${unit ? `\u00a0${unit}` : ""}</strong>${other}`;
  return html`<p class="summary">${dry ? "Would be sent to " : "Sent to "}${who}${how}.
    <span class="quiet"> Policy ${receipt.policy}${receipt.rule ? `, ${receipt.rule}` : ""}${receipt.trial ? ", on trial" : ""}${receipt.retry ? ", retry after a failure" : ""}.</span></p>`;
}

// Outcome compares the result of the request with the prediction.
function Outcome({ entry }) {
  const share = cachedShare(entry);
  return html`<div class="outcome">
    <${PromptBar} entry=${entry} />
    <dl class="facts">
      <${Fact} name="Prompt" field="prompt_tokens" value=${entry.prompt_tokens > 0 ? `${count(entry.prompt_tokens)} tokens` : "–"} />
      <${Fact} name=${html`<i class="key predicted"></i>Predicted`} field="predicted" value=${count(entry.predicted)} />
      <${Fact} name=${html`<i class="key accent"></i>Actually cached`} field="cached" value=${known(entry.cached) ? html`${count(entry.cached)}${share ? html` <span class="quiet">${share}</span>` : ""}` : "–"} />
      <${Fact} name="Prediction" value=${html`<${Verdict} entry=${entry} />`} />
      <${Fact} name="First token" field="ttft" value=${seconds(entry.ttft)} />
      <${Fact} name="Total time" field="duration" value=${seconds(entry.duration)} />
      <${Fact} name="Output" field="output_tokens" value=${known(entry.output_tokens) ? `${count(entry.output_tokens)} tokens` : "–"} />
      <${Fact} name="Result" value=${html`<${End} entry=${entry} />`} />
      ${entry.prefill_worker !== null && html`<${Fact} name="Prefill by" value=${`worker ${workerName(entry.prefill_worker, 0, false, entry.prefill_worker_name)}`} />`}
      ${entry.cell_worker && html`<${Fact} name="In the cell" value=${html`worker ${entry.cell_worker} <span class="quiet">${count(entry.cell_predicted)} predicted</span>`} />`}
      ${entry.attempts > 1 && html`<${Fact} name="Attempts" value=${count(entry.attempts)} />`}
    </dl>
  </div>`;
}

// Decision shows the candidates of a decision.
function Decision({ receipt, dry, children }) {
  const [all, setAll] = useState(false);
  const list = ordered(receipt);
  const ranks = severalRanks(list) || receipt.dp_rank > 0;
  const scale = scaleOf(list);
  const unit = unitOf(receipt);
  const second = secondOf(receipt, list);
  const most = 8;
  const shown = all ? list : list.slice(0, most);
  const lines = useRef(null);
  useEffect(() => { // the focused button is removed
    if (all) lines.current.children[most]?.focus();
  }, [all]);
  return html`
    <${Summary} receipt=${receipt} second=${second} ranks=${ranks} unit=${unit} dry=${dry} />
    ${children}
    <h3>Candidates <span class="quiet">the highest total is chosen; costs are negative</span></h3>
    ${scale.names.length > 0 && html`<details class="legend"><summary>Meaning of the terms</summary><dl>
      ${scale.names.map((name, i) => html`<div><dt><i class=${`key t${i % 8}`}></i>${words(name)}</dt><dd>${meanings[name] || ""}</dd></div>`)}
    </dl>${scale.zero.length > 0 && html`<p class="quiet">Zero for all candidates: ${scale.zero.map(words).join(", ")}.</p>`}</details>`}
    ${list.length === 0 && html`<p class="quiet">No worker was up.</p>`}
    <ol class="candidates" ref=${lines}>${shown.map((c) => html`<${Candidate} key=${`${c.worker_id}/${c.dp_rank}`} c=${c} receipt=${receipt} scale=${scale} second=${c === second} ranks=${ranks} unit=${unit} />`)}</ol>
    ${list.length > most && !all && html`<button type="button" onClick=${() => setAll(true)}>Show all ${list.length} candidates</button>`}
    <p class="quiet fine">${date(typeof receipt.at === "number" ? receipt.at : Date.parse(receipt.at) / 1000)}${receipt.leg && receipt.leg !== "aggregated" ? ` · ${receipt.leg} leg` : ""}</p>`;
}

// Receipt shows an explanation; dry: the request was not sent.
export function Receipt({ receipt, dry }) {
  const entry = receipt.request;
  const outcome = entry && html`<${Outcome} entry=${entry} />${entry.prompt && html`<p class="prompttext">${entry.prompt}</p>`}`;
  const earlier = receipt.earlier || [];
  return html`<div class="receipt">
    ${receipt.candidates
      ? html`<${Decision} receipt=${receipt} dry=${dry}>${!dry && outcome}</${Decision}>`
      : html`${outcome}<p class="quiet">${entry?.end === "running" ? "No decision yet." : "No explanation: decisions are explained while a dashboard is open, and the oldest explanations are removed first."}</p>`}
    ${earlier.map((one) => html`<details class="earlier"><summary>${one.leg === "prefill" ? "Prefill decision" : "Earlier decision"}: worker ${workerName(one.worker_id, one.dp_rank, one.dp_rank > 0, one.worker_name)}</summary><${Decision} receipt=${one} /></details>`)}
  </div>`;
}
