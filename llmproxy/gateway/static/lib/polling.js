// Data that a view requests itself, in addition to the document of each second.

import { LockedError, RefusedError, UnreachableError } from "./client.js";

const EVERY_S = 3;

/** Calls `ask` every few seconds, and at once by `now()`. `show` gets each result, `say` each error message. */
export function polling(store, ask, show, say) {
  let next = 0;
  let turn = 0;
  const now = async () => {
    next = performance.now() + EVERY_S * 1000;
    turn += 1;
    const mine = turn;
    try {
      const found = await ask();
      if (mine === turn) show(found);
      say("");
    } catch (error) {
      if (error instanceof RefusedError) say(error.message);
      else if (!(error instanceof UnreachableError || error instanceof LockedError)) throw error;
    }
  };
  return { now, update: () => (!store.paused && performance.now() >= next ? now() : undefined) };
}
