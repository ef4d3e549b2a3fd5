// The tenants that share the workers: what of each waits and runs, and what it has received.
import { html } from "./vendor/preact-htm.js";
import { count, level, percent, seconds, short } from "./format.js";
import { Empty } from "./parts.js";

const classes = ["interactive", "standard", "batch"];

const share = (part, all) => (all > 0 ? percent(part / all) : "–");

// waitingOf says how many requests wait in each class that has any.
const waitingOf = (waiting) =>
  classes.filter((name) => waiting[name] > 0).map((name) => `${count(waiting[name])} ${name}`).join(", ");

// InTime is the share of the answers with an objective that kept it.
const InTime = ({ kept, missed }) =>
  html`<span class=${"verdict" + (missed > 0 ? " is-off" : "")} title=${`${count(missed)} of ${count(kept + missed)} answers were late`}>${share(kept, kept + missed)}</span>`;

function Row({ tenant, fair }) {
  const { waiting } = tenant;
  const waits = classes.reduce((sum, name) => sum + waiting[name], 0);
  return html`<tr role="row" data-tenant=${tenant.tenant}>
    <td role="cell" class="c-name" title=${tenant.tenant}>${tenant.tenant}${waits > 0 && html` <small>${waitingOf(waiting)}</small>`}</td>
    ${fair && html`<td role="cell" class="num" data-field="weight" data-label="Weight">${tenant.weight > 0 ? level(tenant.weight) : "–"}</td>
    <td role="cell" class="num" data-field="waiting" data-label="Waiting">${count(waits)}</td>
    <td role="cell" class="num" data-field="running" data-label="Running">${count(tenant.running)}</td>
    <td role="cell" class="num" data-field="oldest_wait" data-label="Oldest wait">${waits > 0 ? seconds(tenant.oldest_wait) : "–"}</td>
    <td role="cell" class="num" data-field="behind" data-label="Behind">${seconds(tenant.behind)}</td>`}
    <td role="cell" class="num" data-field="requests" data-label="Requests">${short(tenant.requests)}</td>
    <td role="cell" class="num" data-field="prompt_tokens" data-label="Prompt tokens">${short(tenant.prompt_tokens)}</td>
    <td role="cell" class="num" data-field="hit_rate" data-label="Hit rate">${share(tenant.cached_tokens, tenant.prompt_tokens)}</td>
    <td role="cell" class="num" data-field="answered_tokens" data-label="Answer tokens">${short(tenant.answered_tokens)}</td>
    <td role="cell" class="num" data-field="wait" data-label="Mean wait">${tenant.requests > 0 ? seconds(tenant.wait / tenant.requests) : "–"}</td>
    <td role="cell" class="num" data-field="shed" data-label="Shed">${count(tenant.shed)}</td>
    <td role="cell" class="num" data-field="kept" data-label="In time, first"><${InTime} kept=${tenant.objectives_kept} missed=${tenant.objectives_missed} /></td>
    <td role="cell" class="num" data-field="tokens_kept" data-label="In time, further"><${InTime} kept=${tenant.token_objectives_kept} missed=${tenant.token_objectives_missed} /></td>
  </tr>`;
}

const columns = [
  ["Weight", "", true], ["Waiting", "requests", true], ["Running", "requests", true], ["Oldest wait", "", true], ["Behind", "service", true],
  ["Requests", "routed"], ["Prompt", "tokens"], ["Hit rate", ""], ["Answers", "tokens"], ["Mean wait", "in the queue"], ["Shed", "requests"], ["In time", "first tokens"], ["In time", "further tokens"],
];

// Tenants shows all tenants of the last state.
export function Tenants({ state }) {
  const tenants = state.tenants || [];
  const shown = columns.filter(([, , fairly]) => state.fair || !fairly);
  return html`<section aria-labelledby="title-tenants" class="view tenants">
    <div class="viewhead"><h2 id="title-tenants">Tenants ${tenants.length > 0 && html`<span class="quiet num">${count(tenants.length)}${state.more_tenants > 0 && `, ${count(state.more_tenants)} more are not shown`}</span>`}</h2></div>
    ${tenants.length === 0 && html`<${Empty} title="No tenants yet"><p>A tenant is the name of an API key, or that of a trusted client's header <code>x-llm-d-inference-fairness-id</code>. It appears with its first request.</p></${Empty}>`}
    ${tenants.length > 0 && html`${!state.fair && html`<p class="quiet note">The queue is not shared out between tenants: <code>--router-queue-policy fair</code> does that.</p>`}
    <div class="tablebox" role="region" aria-labelledby="title-tenants" tabindex="0"><table role="table">
      <thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col" class="c-name">Tenant</th>${shown.map(([name, unit]) => html`<th role="columnheader" scope="col" class="num">${name}${unit && html`<small>${unit}</small>`}</th>`)}</tr></thead>
      <tbody role="rowgroup">${tenants.map((tenant) => html`<${Row} key=${tenant.tenant} tenant=${tenant} fair=${state.fair} />`)}</tbody>
    </table></div>`}
  </section>`;
}
