// Each button plays a scene of the demo, as its key in the terminal does.

const { key } = document.getElementById("scenes").dataset;

for (const button of document.querySelectorAll("#scenes button")) {
  button.addEventListener("click", async () => {
    const { place, seconds } = button.dataset;
    button.disabled = true;
    const answer = await fetch(place, { method: "POST", headers: { Authorization: `Bearer ${key}` } }).catch(() => null);
    setTimeout(() => { button.disabled = false; }, answer?.ok ? seconds * 1000 : 0);
  });
}
