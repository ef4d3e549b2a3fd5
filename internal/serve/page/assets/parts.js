// Components shared by several views.
import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { count, known, percent } from "./format.js";

// Empty is the placeholder of a view without data, with a hint.
export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2><div>${children}</div></div>`;

// Meter is a bar from 0 to 1 with its name and its value as text.
export function Meter({ name, share, text, field }) {
  const shown = known(share) ? Math.min(1, Math.max(0, share)) : 0;
  const full = shown >= 0.95 ? " is-full" : "";
  return html`<div class="meter">
    <span class="label">${name}</span><span class="num" data-field=${field}>${text}</span>
    <div class=${"track" + full} role="meter" aria-label=${name} aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.round(shown * 100)} aria-valuetext=${text}><div style=${{ width: `${shown * 100}%` }}></div></div>
  </div>`;
}

// Fact is a name and its value; field identifies it for programs that read the page.
export const Fact = ({ name, value, field, title, tone }) =>
  html`<div class=${"fact" + (tone ? ` is-${tone}` : "")} title=${title}><dt>${name}</dt><dd class="num" data-field=${field}>${value}</dd></div>`;

const ends = { running: "running", done: "done", failed: "failed", cancelled: "cancelled", refused: "refused" };

// End shows the result of a request.
export function End({ entry }) {
  const end = ends[entry.end] || entry.end;
  const status = ["failed", "refused"].includes(entry.end) && entry.status && entry.status !== 200 ? ` ${entry.status}` : "";
  return html`<span class=${`badge end-${entry.end}`} data-field="end">${end}${status}</span>`;
}

// Verdict compares the predicted with the actual cached tokens.
export function Verdict({ entry }) {
  if (!known(entry.cached)) return entry.end === "running" ? html`<span class="quiet">pending</span>` : html`<span class="quiet">not reported</span>`;
  const off = entry.cached - entry.predicted;
  if (off === 0) return html`<span class="verdict is-good">exact</span>`;
  return html`<span class="verdict is-off">${off > 0 ? "+" : "−"}${count(Math.abs(off))}</span>`;
}

// PromptBar draws the predicted and the actual cached share of a prompt.
export function PromptBar({ entry }) {
  const share = (tokens) => `${known(tokens) && entry.prompt_tokens > 0 ? Math.min(100, (100 * tokens) / entry.prompt_tokens) : 0}%`;
  return html`<div class="promptbar" aria-hidden="true">
    <div class="predicted" style=${{ width: share(entry.predicted) }}></div>
    <div class="cached" style=${{ width: share(entry.cached) }}></div>
  </div>`;
}

// cachedShare is the share of the prompt that the worker had cached; null if not reported.
export const cachedShare = (entry) => (known(entry.cached) && entry.prompt_tokens > 0 ? percent(entry.cached / entry.prompt_tokens) : null);

// Confirm asks for confirmation of an action. It takes the focus and returns it.
export function Confirm({ title, text, action, busy, error, onYes, onNo }) {
  const box = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onNo();
  };
  return html`<dialog ref=${box} aria-labelledby="confirm-title" aria-describedby="confirm-text" onCancel=${cancel}>
    <h2 id="confirm-title">${title}</h2>
    <p id="confirm-text">${text}</p>
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <div class="buttons">
      <button type="button" onClick=${onNo}>Cancel</button>
      <button type="button" class="primary" disabled=${busy} onClick=${onYes}>${action}</button>
    </div>
  </dialog>`;
}

// Spark is a small line chart without axes.
export function Spark({ values }) {
  const list = (values || []).slice(-60); // ten minutes
  const seen = list.filter(known);
  if (seen.length < 2) return html`<svg class="spark" aria-hidden="true"></svg>`;
  const top = Math.max(...seen) || 1;
  let line = "";
  let area = "";
  let begun = null; // start of the line segment being drawn
  let x = 0;
  const close = () => {
    if (begun !== null) area += `L${x} 20L${begun} 20Z`;
    begun = null;
  };
  list.forEach((value, i) => {
    if (!known(value)) return close();
    x = ((100 * i) / (list.length - 1)).toFixed(1);
    const to = `${begun === null ? "M" : "L"}${x} ${(19 - (18 * value) / top).toFixed(1)}`;
    begun ??= x;
    line += to;
    area += to;
    return undefined;
  });
  close();
  return html`<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true"><path class="area" d=${area} /><path d=${line} /></svg>`;
}
