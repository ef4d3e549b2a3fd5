// The cluster: the other routers of the same workers, and the connections to them.
import { html } from "./vendor/preact-htm.js";
import { brief, count, known, seconds, short, span } from "./format.js";

const kinds = { embedded: "NATS", existing: "existing NATS", dynamo: "Dynamo" };

// rowsOf joins the members with the routes to them. A route without a member leads to a router that has said nothing yet.
function rowsOf({ members, routes = [] }) {
  const spoken = new Set(members.map((m) => m.id));
  return [
    ...members.map((member) => ({ id: member.id, member, route: routes.find((r) => r.id === member.id) })),
    ...routes.filter((r) => !spoken.has(r.id)).map((route) => ({ id: route.id, route })),
  ];
}

// notesOf lists what needs attention, with its explanation.
const notesOf = (m) =>
  !m ? [["not heard", "It is connected, but has sent nothing yet"]] : [
    !m.kvrouter && ["no kvrouter", "It sends no digests: lost updates are not repaired"],
    m.differing_digests > 0 && ["repairing", `The last ${count(m.differing_digests)} digests of its requests differ from what is known here. They are sent again`],
    m.no_worker > 0 && [`${count(m.no_worker)} without worker`, "Requests in flight there on workers that are not up here: all routers need the same workers and ids"],
  ].filter(Boolean);

function Row({ row: { id, member: m, route: r }, routed, now }) {
  return html`<tr role="row" data-member=${id}>
    <td role="cell" class="c-name"><span title=${id}>${brief(id)}</span>${notesOf(m).map(([text, title]) => html` <span class="badge is-note" title=${title}>${text}</span>`)}</td>
    <td role="cell" class="num" data-field="lag" data-label="Lag">${seconds(m?.lag_seconds)}</td>
    <td role="cell" class="num" data-field="in_flight" data-label="In flight">${count(m?.in_flight)}</td>
    ${routed && html`<td role="cell" class="num" data-field="round_trip" data-label="Round trip">${seconds(r?.round_trip_seconds)}</td>
    <td role="cell" class="num" data-field="pending" data-label="Pending, bytes">${short(r?.pending_bytes)}</td>`}
    <td role="cell" class="num" data-field="since" data-label="Connected">${m ? span(now - Date.parse(m.since) / 1000) : "–"}</td>
    ${routed && html`<td role="cell" class="num c-address" data-label="Address"><span title=${r?.address}>${r?.address || "–"}</span></td>`}
  </tr>`;
}

// Cluster shows the other routers, folded to a line: most often that says enough.
export function Cluster({ cluster: c, now }) {
  const rows = rowsOf(c);
  const most = (values) => Math.max(...values.filter(known)); // -Infinity, which is shown as unknown, without any
  const routed = c.kind === "embedded";
  const trip = c.kind === "existing" ? c.round_trip_seconds : most(rows.map(({ route }) => route?.round_trip_seconds));
  const troubled = rows.filter(({ member }) => notesOf(member).length > 0).length;
  return html`<details class="cluster">
    <summary><b>Cluster</b> ${c.name} <span class="quiet num">${kinds[c.kind] || c.kind}${c.server && ` ${c.server}`} · ${count(c.members.length)} other ${c.members.length === 1 ? "router" : "routers"}${
      rows.length > 0 && html` · lag <span data-field="most_lag">${seconds(most(c.members.map((m) => m.lag_seconds)))}</span>`}${
      known(trip) && html` · round trip <span data-field="most_trip">${seconds(trip)}</span>`} · ${count(c.members.reduce((sum, m) => sum + m.in_flight, 0))} in flight there</span>
      ${!c.connected && html` <span class="badge is-note" data-field="disconnected">not connected</span>`}${troubled > 0 && html` <span class="badge is-note">${count(troubled)} to look at</span>`}</summary>
    ${rows.length > 0 && html`<div class="tablebox" role="region" aria-label="Routers of the cluster" tabindex="0"><table role="table">
      <thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col" class="c-name">Router</th><th role="columnheader" scope="col" class="num">Lag</th><th role="columnheader" scope="col" class="num">In flight</th>${
        routed && html`<th role="columnheader" scope="col" class="num">Round trip</th><th role="columnheader" scope="col" class="num">Pending<small>bytes</small></th>`}<th role="columnheader" scope="col" class="num">Connected</th>${
        routed && html`<th role="columnheader" scope="col" class="num">Address</th>`}</tr></thead>
      <tbody role="rowgroup">${rows.map((row) => html`<${Row} key=${row.id} row=${row} routed=${routed} now=${now} />`)}</tbody>
    </table></div>`}
  </details>`;
}
