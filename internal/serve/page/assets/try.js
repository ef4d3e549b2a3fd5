// The Try view: a chat through the router, with the explanation of its decision beside the answer.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { chat, receipt as fetchReceipt, where } from "./api.js";
import { count, known, rate, seconds } from "./format.js";
import { Fact } from "./parts.js";
import { Receipt } from "./receipt.js";

const mostTurns = 40; // maximum number of messages kept

// settled returns whether the request of an explanation has ended.
const settled = (receipt) => receipt?.request && receipt.request.end !== "running";

// later waits for ms, or until signal aborts.
const later = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()));
  });

// Try stays in the page while another view is shown, so that a chat continues.
export function Try({ state, hidden }) {
  const [text, setText] = useState("");
  const [model, setModel] = useState("");
  const [most, setMost] = useState(128);
  const [key, setKey] = useState("");
  const [turns, setTurns] = useState([]); // messages: {role, content}
  const [busy, setBusy] = useState("");
  const [error, setError] = useState("");
  const [timing, setTiming] = useState(null);
  const [shown, setShown] = useState(null); // {receipt, dry}
  const running = useRef(null);
  const models = state.models || [];
  const box = useRef(null);

  useEffect(() => {
    return () => running.current?.abort();
  }, []);
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turns]);

  const body = () => ({
    model: model || models[0],
    messages: [...turns.map(({ role, content }) => ({ role, content })), { role: "user", content: text }],
    max_tokens: most,
    stream: true,
    stream_options: { include_usage: true },
  });

  // begin aborts the previous operation and starts a new one.
  function begin(what) {
    running.current?.abort();
    running.current = new AbortController();
    setBusy(what);
    setError("");
    return running.current.signal;
  }

  // follow shows the explanation as soon as it exists, and again when the request has ended.
  async function follow(id, signal, tries) {
    for (let i = 0; i < tries && !signal.aborted; i++) {
      try {
        const receipt = await fetchReceipt(id, signal);
        if (signal.aborted) return;
        setShown({ receipt, dry: false });
        if (settled(receipt)) return;
      } catch (failure) {
        if (failure.status !== 404) return;
      }
      await later(250, signal);
    }
  }

  async function send(event) {
    event.preventDefault();
    if (!text.trim() || busy) return;
    const sent = body();
    const signal = begin("chat");
    const before = turns;
    const asked = { role: "user", content: text };
    const from = performance.now();
    let answer = "";
    let first = null;
    let id = "";
    setTurns([...before, asked, { role: "assistant", content: "" }]);
    setText("");
    setTiming(null);
    setShown(null);
    try {
      const end = await chat(
        sent,
        state.try_asks ? key : "",
        (piece) => {
          first ??= performance.now();
          answer += piece;
          setTurns([...before, asked, { role: "assistant", content: answer }].slice(-mostTurns));
        },
        (given) => {
          id = given;
          if (id) follow(id, signal, 2);
        },
        signal,
      );
      const ended = performance.now();
      const tokens = end.usage?.completion_tokens;
      setTiming({
        first: first === null ? null : (first - from) / 1000,
        whole: (ended - from) / 1000,
        tokens,
        speed: known(tokens) && tokens > 1 && first !== null && ended > first ? ((tokens - 1) * 1000) / (ended - first) : null,
        finish: end.finish,
      });
      if (id) follow(id, signal, 12);
    } catch (failure) {
      if (running.current?.signal !== signal) return; // another chat has begun
      if (!answer) setTurns(before);
      if (failure.name !== "AbortError") setError(failure.message);
      if (!answer) setText(asked.content);
    }
    setBusy("");
  }

  async function ask() {
    if (!text.trim() || busy) return;
    const signal = begin("where");
    try {
      setShown({ receipt: await where(body(), signal), dry: true });
    } catch (failure) {
      if (running.current?.signal !== signal) return;
      if (failure.name !== "AbortError") setError(failure.message);
    }
    setBusy("");
  }

  function restart() {
    running.current?.abort();
    running.current = null;
    document.getElementById("try-text").focus(); // the button is removed
    setTurns([]);
    setTiming(null);
    setShown(null);
    setError("");
    setBusy("");
  }

  const enter = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  };
  return html`<section aria-labelledby="title-try" class="view try" hidden=${hidden}>
    <div class="viewhead"><h2 id="title-try">Try <span class="quiet">a chat through this router</span></h2>
      ${turns.length > 0 && html`<div class="tools"><button type="button" onClick=${restart}>New chat</button></div>`}</div>
    <div class="columns">
      <div class="talk">
        <div class="log" role="log" aria-label="Chat" aria-busy=${busy === "chat"} ref=${box}>${turns.length > 0 && html`<ol class="turns">${turns.map((turn, i) => html`<li key=${i} class=${turn.role}><span class="who">${turn.role === "user" ? "You" : "Answer"}</span><div class="text">${turn.content || (busy === "chat" ? html`<span class="quiet">waiting for the first token …</span>` : html`<span class="quiet">empty answer</span>`)}</div></li>`)}</ol>`}</div>
        ${timing && html`<dl class="facts timing" aria-label="Timing">
          <${Fact} name="First token" value=${seconds(timing.first)} /><${Fact} name="Total time" value=${seconds(timing.whole)} />
          <${Fact} name="Output" value=${known(timing.tokens) ? `${count(timing.tokens)} tokens` : "–"} /><${Fact} name="Speed" value=${known(timing.speed) ? `${rate(timing.speed)} tok/s` : "–"} />
        </dl>`}
        <form class="ask" onSubmit=${send}>
          <label for="try-text">${turns.length > 0 ? "Next message" : "Message"}</label>
          <textarea id="try-text" rows="4" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${enter} placeholder="Ask something. Longer prompts benefit more from the prefix cache."></textarea>
          <div class="row">
            ${models.length > 1 && html`<div class="field"><label for="try-model">Model</label><select id="try-model" value=${model || models[0]} onChange=${(e) => setModel(e.target.value)}>${models.map((name) => html`<option value=${name}>${name}</option>`)}</select></div>`}
            ${state.try_asks && html`<div class="field"><label for="try-key">API key</label><input id="try-key" type="password" autocomplete="off" required value=${key} onInput=${(e) => setKey(e.target.value)} title="A key of the OpenAI port. It is not stored." /></div>`}
            <div class="field"><label for="try-most">Maximum tokens</label><input id="try-most" type="number" min="1" max="4096" value=${most} onInput=${(e) => setMost(Math.min(4096, Math.max(1, Number(e.target.value) || 1)))} /></div>
            <div class="buttons">
              ${busy === "chat" && html`<button type="button" onClick=${() => running.current?.abort()}>Stop</button>`}
              <button type="button" id="try-where" disabled=${!text.trim() || busy !== ""} onClick=${ask}>Preview worker</button>
              <button type="submit" id="try-send" class="primary" disabled=${!text.trim() || busy !== ""}>Send</button>
            </div>
          </div>
          ${error && html`<p class="problem" role="alert">${error}</p>`}
        </form>
      </div>
      <div class="panel beside" aria-live="polite" aria-label="Explanation" role="region">
        ${shown && html`<header><h2>${shown.dry ? "Preview" : "Explanation"}</h2></header><${Receipt} receipt=${shown.receipt} dry=${shown.dry} />`}
        ${!shown && html`<div class="hint"><h3>Decision explanation</h3><p>It shows the chosen worker, the score of each worker, and the predicted and actual cached prompt tokens. Send a second message: by then the previous messages are cached.</p>
          <p><strong>Preview worker</strong> computes the decision only: nothing is sent or reserved.</p></div>`}
      </div>
    </div>
  </section>`;
}
