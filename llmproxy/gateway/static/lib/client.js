// All requests of the page to the proxy.

import { inTab } from "./storage.js";

const TIMEOUT_MS = 5000;
const KEY = "llmproxy-admin-key";

/** The proxy requires its admin key. */
export class LockedError extends Error {}
/** The proxy does not answer in time, or answers 5xx. */
export class UnreachableError extends Error {}
/** The proxy refused the request, for the reason in the message. */
export class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The admin key, stored for this tab until the tab is closed. */
export const key = {
  get: () => inTab.get(KEY),
  set: (value) => inTab.set(KEY, value),
};

async function ask(path, options = {}) {
  // A browser refuses to send such a header field, with an error that does not say why.
  if (/[^\x21-\x7e]/.test(key.get())) throw new LockedError("A key is printable ASCII without spaces.");
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    throw new UnreachableError(error.message);
  }
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not an error of this proxy: the status has to suffice.
  }
  if (answer.status >= 500) throw new UnreachableError(message);
  if ([401, 403].includes(answer.status) || (answer.status === 404 && message.startsWith("There is nothing at"))) {
    throw new LockedError(message);
  }
  throw new RefusedError(answer.status, message);
}

/** Reads the body of an answer. Throws UnreachableError if the connection breaks. */
async function body(answer, kind) {
  try {
    return await answer[kind]();
  } catch (error) {
    throw new UnreachableError(error.message);
  }
}

export async function json(path, query = {}) {
  const wanted = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null));
  const answer = await ask(wanted.size ? `${path}?${wanted}` : path);
  return answer.status === 204 ? null : body(answer, "json");
}

export async function post(path) {
  return body(await ask(path, { method: "POST" }), "json");
}

/** Columns of the past by their names: {names, from_s, step_s, rows, column(name)}. */
export async function history(span, prefixes) {
  const answer = await ask(`/debug/history?${new URLSearchParams({ span, columns: prefixes.join(",") })}`);
  const bytes = await body(answer, "arrayBuffer");
  const length = new DataView(bytes).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const places = new Map(head.names.map((name, at) => [name, 4 + length + at * head.rows * 4]));
  return { ...head, column: (name) => new Float32Array(bytes, places.get(name), head.rows) };
}
