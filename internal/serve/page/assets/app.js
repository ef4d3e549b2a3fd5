// The dashboard of a running kvrouter: sign-in, navigation, header, and the stream of states.
import { html, render, useCallback, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { follow, signIn, signOut } from "./api.js";
import { Cache } from "./cache.js";
import { Fleet } from "./fleet.js";
import { count, percent, rate, seconds, short, span } from "./format.js";
import { Spark } from "./parts.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";
import { Trends } from "./trends.js";
import { Try } from "./try.js";

const views = [["fleet", "Fleet"], ["requests", "Requests"], ["tenants", "Tenants"], ["cache", "Cache"], ["trends", "Trends"], ["try", "Try"]];

const silentAfter = 5000; // ms without a state: the connection counts as lost
const hiddenFor = 20_000; // ms in the background, after which the stream is closed
const remembered = "kvrouter.signed-in"; // that this browser has signed in; never the key

// signedIn reads or sets whether this browser has signed in. Browsers without storage throw.
function signedIn(now) {
  try {
    if (now === undefined) return localStorage.getItem(remembered) !== null;
    if (now) localStorage.setItem(remembered, "yes");
    else localStorage.removeItem(remembered);
  } catch {
    // The sign-out button is not shown; the session expires.
  }
  return false;
}

// placeOf reads the address: #/requests/ID.
function placeOf(hash) {
  const [view, ...rest] = hash.replace(/^#\/?/, "").split("/");
  let id = rest.join("/");
  try {
    id = decodeURIComponent(id);
  } catch {
    // A stray percent sign: use the text unchanged.
  }
  return { view: views.some(([name]) => name === view) ? view : "fleet", id };
}

function usePlace() {
  const [place, setPlace] = useState(placeOf(location.hash));
  useEffect(() => {
    const heard = () => setPlace(placeOf(location.hash));
    addEventListener("hashchange", heard);
    return () => removeEventListener("hashchange", heard);
  }, []);
  return place;
}

// useStream keeps the newest state. link is connecting, live, lost, full or locked.
function useStream(locked, onLocked) {
  const [state, setState] = useState(null);
  const [trends, setTrends] = useState(null);
  const [link, setLink] = useState("connecting");
  useEffect(() => {
    if (locked) return undefined;
    let over = false;
    let gone = false; // the browser shows another page
    let leave = null; // aborts the stream
    let again = 0; // timer of the next try
    let silence = 0; // timer of the stall
    let background = 0; // timer that closes the stream in the background
    let wait = 500; // ms before the next try

    const heard = (name, data) => {
      clearTimeout(silence);
      silence = setTimeout(() => leave?.abort(), silentAfter);
      if (name === "trends") setTrends(data);
      if (name !== "state") return;
      wait = 500;
      setState(data);
      setLink("live");
    };
    async function connect() {
      clearTimeout(again);
      clearTimeout(silence);
      leave?.abort();
      const mine = new AbortController();
      leave = mine;
      silence = setTimeout(() => mine.abort(), silentAfter);
      let next = "lost";
      try {
        await follow(heard, mine.signal);
      } catch (failure) {
        if (failure.status === 401) return over || onLocked();
        if (failure.status === 503) next = "full";
      } finally {
        if (leave === mine) clearTimeout(silence);
      }
      if (document.hidden && leave === mine) mine.abort(); // seen reconnects
      if (over || leave !== mine || document.hidden || gone) return undefined;
      setLink(next);
      again = setTimeout(connect, wait);
      wait = Math.min(5000, wait * 2);
      return undefined;
    }
    const seen = () => {
      clearTimeout(background);
      if (document.hidden) {
        background = setTimeout(() => leave?.abort(), hiddenFor);
      } else if (leave?.signal.aborted) {
        connect();
      }
    };
    // A browser keeps previous pages with their connections, of which it has six per host.
    const left = () => {
      gone = true;
      leave?.abort();
    };
    const back = (event) => {
      gone = false;
      if (event.persisted) connect();
    };
    document.addEventListener("visibilitychange", seen);
    addEventListener("pagehide", left);
    addEventListener("pageshow", back);
    connect();
    seen(); // the page may be opened in the background
    return () => {
      over = true;
      document.removeEventListener("visibilitychange", seen);
      removeEventListener("pagehide", left);
      removeEventListener("pageshow", back);
      for (const timer of [again, silence, background]) clearTimeout(timer);
      leave?.abort();
    };
  }, [locked]);
  return { state, trends, link };
}

const Mark = () => html`<svg class="mark" viewBox="0 0 24 24" aria-hidden="true"><path d="M3 12h6l5-6.5h7" /><path d="M9 12l5 6.5h7" class="other" /><circle cx="4" cy="12" r="2.6" /></svg>`;

function SignIn({ onDone }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    field.current?.focus();
  }, []);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      await signIn(key);
      onDone();
    } catch (failure) {
      const said = { 401: "Invalid key.", 429: "Too many attempts. Try again later." };
      setError(said[failure.status] || failure.message || "No response from the router.");
      field.current?.select();
    }
    setBusy(false);
  }
  return html`<main class="signin"><form class="sheet" onSubmit=${submit} aria-labelledby="signin-title">
    <div class="brand"><${Mark} /><h1 id="signin-title">kvrouter</h1></div>
    <label for="key">Router API key</label>
    <input id="key" ref=${field} type="password" autocomplete="current-password" required value=${key} onInput=${(e) => setKey(e.target.value)} aria-invalid=${error ? "true" : undefined} aria-describedby="key-help" />
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <button type="submit" class="primary" disabled=${busy || !key}>Sign in</button>
    <p id="key-help" class="quiet fine">A session lasts 12 hours. The key is not stored in this browser.</p>
  </form></main>`;
}

const linkTexts = { connecting: "Connecting", lost: "Connection lost, retrying", full: "Too many viewers, retrying" };

function Status({ state, link }) {
  const [tone, text] = link !== "live" ? ["lost", linkTexts[link]] : state.draining ? ["draining", "Draining"] : state.ready ? ["ready", "Ready"] : ["starting", "Not ready"];
  return html`<span class=${`status is-${tone}`} role="status" data-field="status"><i class="dot" aria-hidden="true"></i>${text}</span>`;
}

function Tile({ name, note, value, more, series, field }) {
  return html`<div class="tile"><dt>${name}${note && html` <span class="quiet">${note}</span>`}</dt><dd><span class="num big" data-field=${field}>${value}</span>${more && html` <span class="num more">${more}</span>`}</dd><${Spark} values=${series} /></div>`;
}

function Tiles({ state, trends }) {
  const { rates: r, totals: t } = state;
  const s = trends?.series || {};
  const inFlight = Object.values(s.in_flight || {});
  const sum = (inFlight[0] || []).map((_, i) => inFlight.reduce((all, list) => all + (list[i] || 0), 0));
  return html`<dl class="tiles" aria-label="The last minute">
    <${Tile} name="Requests" note="/s" field="requests_per_second" value=${rate(r.requests_per_second)} more=${html`${short(t.requests)} total`} series=${s.requests_per_second} />
    <${Tile} name="Hit rate" field="hit_rate" value=${percent(r.hit_rate)} series=${s.hit_rate} />
    <${Tile} name="Exact" note="predictions" field="exact" value=${percent(r.exact)} series=${s.exact} />
    <${Tile} name="First token" note="p50" field="ttft_p50" value=${seconds(r.ttft_p50)} more=${html`p99 ${seconds(r.ttft_p99)}`} series=${s.ttft_p99} />
    <${Tile} name="Next token" note="p50" field="itl_p50" value=${seconds(r.itl_p50)} more=${html`p99 ${seconds(r.itl_p99)}`} series=${s.itl_p99} />
    <${Tile} name="In flight" field="in_flight" value=${count(t.in_flight)} more=${t.queued > 0 ? html`${count(t.queued)} queued` : ""} series=${sum} />
    <${Tile} name="Errors" field="errors" value=${short(t.errors)} more=${html`of ${short(t.requests)}`} />
  </dl>`;
}

function App() {
  const place = usePlace();
  const [locked, setLocked] = useState(false);
  const [said, setSaid] = useState("");
  const lock = useCallback(() => setLocked(true), []);
  const { state, trends, link } = useStream(locked, lock);
  useEffect(() => {
    if (!said) return undefined;
    const timer = setTimeout(() => setSaid(""), 5000);
    return () => clearTimeout(timer);
  }, [said]);
  const name = views.find(([view]) => view === place.view)[1];
  useEffect(() => {
    document.title = locked ? "Sign in · kvrouter" : `${name} · kvrouter`;
  }, [locked, name]);
  const wasLocked = useRef(false);
  useEffect(() => {
    if (wasLocked.current && !locked) document.getElementById("main").focus();
    wasLocked.current = locked;
  }, [locked]);

  if (locked) {
    const done = () => {
      signedIn(true);
      setLocked(false);
    };
    return html`<${SignIn} onDone=${done} />`;
  }
  const leave = async () => {
    signedIn(false);
    await signOut().catch(() => {});
    setLocked(true);
  };
  const stale = link !== "live" && state ? " is-stale" : "";
  return html`<a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the view</a>
    <header class="top">
      <a class="brand" href="#/fleet" aria-label="kvrouter, fleet"><${Mark} /><span>kvrouter</span></a>
      <nav aria-label="Views"><ul>${views.map(([view, title]) => html`<li><a href=${`#/${view}`} aria-current=${place.view === view ? "page" : undefined}>${title}</a></li>`)}</ul></nav>
      <div class="right">
        ${state && html`<span class="about quiet" title=${`version ${state.version}`}>policy <b>${state.policy}</b> · up ${span(state.uptime)}</span>`}
        ${state?.demo && html`<span class="badge is-demo" title="The traffic is simulated">demo</span>`}
        <${Status} state=${state} link=${link} />
        ${signedIn() && html`<button type="button" class="small" onClick=${leave}>Sign out</button>`}
      </div>
    </header>
    <main id="main" tabindex="-1" class=${`at-${place.view}${stale}`}>
      <h1 class="sr">kvrouter</h1>
      ${!state && html`<p class="alone quiet">${linkTexts[link] || "Connecting"} …</p>`}
      ${state && html`<${Tiles} state=${state} trends=${trends} />
        ${place.view === "fleet" && html`<${Fleet} state=${state} say=${setSaid} />`}
        ${place.view === "requests" && html`<${Requests} state=${state} id=${place.id} />`}
        ${place.view === "tenants" && html`<${Tenants} state=${state} />`}
        ${place.view === "cache" && html`<${Cache} state=${state} />`}
        ${place.view === "trends" && html`<${Trends} trends=${trends} />`}
        <${Try} state=${state} hidden=${place.view !== "try"} />`}
    </main>
    <footer class="bottom quiet">${state && html`kvrouter ${state.version} · block size ${count(state.block_size)} tokens · ${(state.models || []).join(", ") || "no model yet"}`}</footer>
    <div class="toast" role="status">${said && html`<span>${said}</span>`}</div>`;
}

render(html`<${App} />`, document.getElementById("app"));
