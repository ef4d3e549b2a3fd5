// Requests to the router. Every address is relative to /ui/, so that the dashboard also works behind a proxy's prefix.

// Refused is a response without success: its HTTP status and its error message.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// refusal reads the error message of a response without success.
async function refusal(response) {
  let text = "";
  try {
    text = (await response.text()).slice(0, 2000);
    const said = JSON.parse(text).error;
    text = (typeof said === "string" ? said : said?.message) || text;
  } catch {
    // Not JSON: the text itself is shown.
  }
  return new Refused(response.status, text || `The router returned status ${response.status}.`);
}

// request sends the body, if any, as JSON, and the key, if any. It throws a Refused unless the response is a success.
async function request(method, path, body, signal, key) {
  const headers = { "X-Kvrouter-Page": "1" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (method === "POST") headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method,
    headers,
    signal,
    cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

export const signIn = (key) => request("POST", "sign-in", { key });
export const signOut = () => request("POST", "sign-out");
export const act = (worker, action) => request("POST", `workers/${worker}/${action}`);
export const receipt = async (id, signal) => (await request("GET", `requests/${encodeURIComponent(id)}`, undefined, signal)).json();
export const where = async (body, signal) => (await request("POST", "where", body, signal)).json();

// events calls heard(name, data) for each server-sent event of a response until it ends.
async function events(response, heard) {
  const most = 32 << 20; // characters of one event
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value.replaceAll("\r", "");
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      let name = "message";
      const data = [];
      for (const line of rest.slice(0, end).split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      if (data.length > 0) heard(name, data.join("\n"));
    }
    if (rest.length > most) throw new Error("An event of the router is too long.");
  }
}

// follow calls heard(name, object) for each event of the stream until it ends or signal aborts it. It uses fetch because
// EventSource hides the status: 401 shows the sign-in view.
export async function follow(heard, signal) {
  const response = await request("GET", "stream", undefined, signal);
  await events(response, (name, data) => heard(name, JSON.parse(data)));
}

// chat sends a chat, with a key of the OpenAI port if that is required, and calls heard(text) for each piece of the
// answer. It returns the finish reason and the usage.
export async function chat(body, key, heard, begun, signal) {
  const response = await request("POST", "try", body, signal, key);
  begun(response.headers.get("X-Request-Id") || "");
  const end = { finish: "", usage: null };
  const read = (answer) => {
    if (answer.error) throw new Refused(response.status, answer.error.message || "The answer was interrupted.");
    const choice = answer.choices?.[0];
    const message = choice?.delta || choice?.message;
    const text = (message?.reasoning_content || message?.reasoning || "") + (message?.content || "");
    if (text) heard(text);
    end.finish = choice?.finish_reason || end.finish;
    end.usage = answer.usage || end.usage;
  };
  if ((response.headers.get("Content-Type") || "").includes("text/event-stream")) {
    await events(response, (_, data) => data === "[DONE]" || read(JSON.parse(data)));
  } else {
    read(await response.json());
  }
  return end;
}
