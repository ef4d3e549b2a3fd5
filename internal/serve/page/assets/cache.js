// The hottest branches of the prefix tree: each row is a piece of prompt, drawn at its position in the prompts that share it.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { brief, count, short, span } from "./format.js";
import { Empty } from "./parts.js";

const few = 6; // branches of a piece shown by default

// treeOf sorts the nodes under their parents by hits and lists them from the top. A node whose parent is not shown is a
// root. If a node has many branches, one row represents the cooler ones.
function treeOf(nodes, blockSize, closed, opened) {
  const ids = new Set(nodes.map((node) => node.id));
  const children = new Map();
  for (const node of nodes) {
    const parent = ids.has(node.parent) && node.parent !== node.id ? node.parent : "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  for (const list of children.values()) list.sort((a, b) => b.hits - a.hits || b.tokens - a.tokens || (a.id < b.id ? -1 : 1));
  const rows = [];
  const visit = (node, level) => {
    const below = children.get(node.id) || [];
    const from = node.depth * blockSize;
    rows.push({ node, level, below: below.length, from, end: from + node.tokens });
    if (!closed.has(node.id)) branches(below, node.id, level + 1);
  };
  const branches = (list, parent, level) => {
    const shown = opened.has(parent) || list.length <= few + 1 ? list : list.slice(0, few);
    for (const child of shown) visit(child, level);
    if (shown.length < list.length) rows.push({ parent, level, more: list.length - shown.length, most: list[shown.length].hits, first: list[shown.length].id });
  };
  branches(children.get("") || [], "", 0);
  return rows;
}

const isLong = (name) => name.length > 6; // not a small number

// ticksFor returns round numbers of tokens for the axis.
function ticksFor(longest) {
  const rough = longest / 4;
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const ticks = [];
  for (let at = 0; at <= Math.max(longest, step); at += step) ticks.push(at);
  return ticks;
}

function Row({ row, longest, most, now, shut, onShut }) {
  const { node, level, below, from, end } = row;
  const heat = most > 0 ? Math.log1p(node.hits) / Math.log1p(most) : 0;
  const name = node.text || node.id.slice(0, 10);
  const some = node.workers.slice(0, node.workers.some(isLong) ? 2 : 5);
  return html`<tr role="row" data-node=${node.id} tabindex="-1">
    <td role="cell" class="c-name"><div class="indent" style=${{ "--level": String(Math.min(level, 9)) }}>
      ${below > 0 ? html`<button type="button" class="fold" aria-expanded=${!shut} onClick=${onShut} aria-label=${`${below} branches of ${name}`}><i aria-hidden="true"></i></button>` : html`<span class="leaf" aria-hidden="true"></span>`}
      <span class=${node.text ? "said" : "hash"} title=${node.text ? node.text : node.id}>${name}</span><span class="sr">, level ${level + 1}</span></div></td>
    <td role="cell" class="c-axis"><div class="axis" aria-hidden="true"><div class="piece" title=${`tokens ${count(from)} to ${count(end)}`}
      style=${{ left: `${(100 * from) / longest}%`, width: `${(100 * (end - from)) / longest}%`, "--heat": heat.toFixed(2) }}></div></div></td>
    <td role="cell" class="c-tokens num" data-field="tokens" data-label="Tokens">${count(node.tokens)}</td>
    <td role="cell" class="c-end num">${count(end)}</td>
    <td role="cell" class="c-hits num" data-field="hits" data-label="Hits, 5 min">${count(node.hits)}</td>
    <td role="cell" class="c-workers" data-field="workers" data-label="Cached by" title=${`workers ${node.workers.join(", ")}`}>${some.map((n) => html`<span class="chipw">${brief(n, 22)}</span>`)}${node.workers.length === 0 && html`<span class="quiet">none</span>`}${node.workers.length > some.length && html`<span class="quiet">+${node.workers.length - some.length}</span>`}</td>
    <td role="cell" class="c-last num" data-label="Last used">${node.last > 0 ? `${span(now - node.last, true)} ago` : "–"}</td>
  </tr>`;
}

// More is the row of the cooler branches of a piece.
const More = ({ row, onOpen }) => html`<tr role="row" class="more"><td role="cell" colspan="7"><div class="indent" style=${{ "--level": String(Math.min(row.level, 9)) }}>
  <button type="button" class="small" onClick=${onOpen}>${count(row.more)} more with ${row.most === 0 ? "no hits" : row.most === 1 ? "1 hit or none" : `${count(row.most)} hits or fewer`}</button></div></td></tr>`;

// Cache shows the tree of the last state.
export function Cache({ state }) {
  const [closed, setClosed] = useState(new Set());
  const [opened, setOpened] = useState(new Set());
  const first = useRef(""); // the first row that replaces a button
  useEffect(() => {
    if (first.current) document.querySelector(`[data-node="${first.current}"]`)?.focus();
    first.current = "";
  }, [opened]);
  const nodes = state.cache?.nodes || [];
  const rows = treeOf(nodes, state.block_size, closed, opened);
  const longest = Math.max(1, ...nodes.map((node) => node.depth * state.block_size + node.tokens));
  const most = Math.max(0, ...nodes.map((node) => node.hits));
  const ticks = ticksFor(longest);
  const named = nodes.some((node) => node.workers.some(isLong));
  const toggle = (id) => {
    const next = new Set(closed);
    if (!next.delete(id)) next.add(id);
    setClosed(next);
  };
  const open = (row) => {
    first.current = row.first;
    setOpened(new Set([...opened, row.parent]));
  };
  return html`<section aria-labelledby="title-cache" class="view cache">
    <div class="viewhead"><h2 id="title-cache">Cache <span class="quiet">the hottest branches of the prefix tree</span></h2></div>
    ${nodes.length === 0 && html`<${Empty} title="No cached prompts yet"><p>Branches appear once workers have reported computed prompts of at least one block (${count(state.block_size)} tokens) by KV events. Send a prompt from the view <a href="#/try">Try</a>.</p></${Empty}>`}
    ${nodes.length > 0 && html`<p class="quiet note">Each bar is a piece of prompt at its position in the prompts that share it. A stronger colour means more hits in the last 5 minutes.
      ${!state.show_text && html` Names are hashes. <code>--page-show-text</code> shows the beginnings of prompts.`}${state.cache.truncated && " Cooler branches are not shown."}</p>
    <div class="tablebox" role="region" aria-labelledby="title-cache" tabindex="0"><table role="table" class=${(state.show_text ? "with-text" : "") + (named ? " named" : "")} style=${{ "--step": `${(100 * ticks[1]) / longest}%` }}>
      <thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col" class="c-name">Branch</th>
        <th role="columnheader" scope="col" class="c-axis"><span class="sr">Position in the prompt, tokens</span><div class="axis ticks" aria-hidden="true">${ticks.map((at) => html`<span class=${at > 0.94 * longest ? "at-end" : ""} style=${{ left: `${(100 * at) / longest}%` }}>${short(at)}</span>`)}</div></th>
        <th role="columnheader" scope="col" class="c-tokens num">Tokens</th><th role="columnheader" scope="col" class="c-end num">Up to</th><th role="columnheader" scope="col" class="c-hits num">Hits<small>5 min</small></th>
        <th role="columnheader" scope="col" class="c-workers">Cached by</th><th role="columnheader" scope="col" class="c-last num">Last used</th></tr></thead>
      <tbody role="rowgroup">${rows.map((row) => row.more ? html`<${More} key=${`more ${row.parent}`} row=${row} onOpen=${() => open(row)} />` : html`<${Row} key=${row.node.id} row=${row} longest=${longest} most=${most} now=${state.at} shut=${closed.has(row.node.id)} onShut=${() => toggle(row.node.id)} />`)}</tbody>
    </table></div>`}
  </section>`;
}
