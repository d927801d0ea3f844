// Each button plays a scene, like its key in the terminal.

import { key } from "./lib/client.js";

// The page of the demo need not ask for its key, which is not secret.
key.set(document.getElementById("scenes").dataset.key);

for (const button of document.querySelectorAll("#scenes button")) {
  button.addEventListener("click", async () => {
    const { place, seconds } = button.dataset;
    button.disabled = true;
    const answer = await fetch(place, { method: "POST", headers: { Authorization: `Bearer ${key.get()}` } }).catch(() => null);
    setTimeout(() => { button.disabled = false; }, answer?.ok ? seconds * 1000 : 0);
  });
}
