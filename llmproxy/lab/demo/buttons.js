// Each button plays a scene of the demo, as its key in the terminal does.

import { key } from "./lib/client.js";

// The page of the demo needs no asking: its key is no secret.
key.set(document.getElementById("scenes").dataset.key);

for (const button of document.querySelectorAll("#scenes button")) {
  button.addEventListener("click", async () => {
    const { place, seconds } = button.dataset;
    button.disabled = true;
    const answer = await fetch(place, { method: "POST", headers: { Authorization: `Bearer ${key.get()}` } }).catch(() => null);
    setTimeout(() => { button.disabled = false; }, answer?.ok ? seconds * 1000 : 0);
  });
}
