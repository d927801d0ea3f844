// Everything that the page asks of the proxy.

import { inTab } from "./kept.js";

const TIMEOUT_MS = 5000;
const KEY = "llmproxy-admin-key";

/** The proxy shows this only to those with its admin key. */
export class LockedError extends Error {}
/** Nothing answers, or not in time. */
export class UnreachableError extends Error {}
/** The proxy answered, and refused for a reason that it says. */
export class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The key is kept for this tab alone, until it is closed. */
export const key = {
  get: () => inTab.get(KEY),
  set: (value) => inTab.set(KEY, value),
};

/** The pool, of those that have a leader of their own, that this page is about; null where it is about all others. */
export const pool = new URLSearchParams(location.search).get("pool");

/** A path of what the page shows, at the leader of its pool. */
function ofPool(path) {
  return pool && path.startsWith("/debug/") ? `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams({ pool })}` : path;
}

async function ask(path, options = {}) {
  // A browser sends no request with such a field, and says no more than that it failed.
  if (/[^\x21-\x7e]/.test(key.get())) throw new LockedError("A key is printable ASCII without spaces.");
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  let answer;
  try {
    answer = await fetch(ofPool(path), { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    throw new UnreachableError(error.message);
  }
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // A body of another server; its status says enough.
  }
  if (answer.status >= 500) throw new UnreachableError(message);
  if ([401, 403].includes(answer.status) || (answer.status === 404 && message.startsWith("There is nothing at"))) {
    throw new LockedError(message);
  }
  throw new RefusedError(answer.status, message);
}

/** The body of an answer, which may break off. */
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
