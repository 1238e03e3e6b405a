"use strict";
(() => {
  const tokens = [...document.querySelectorAll(".token")];
  const ramp = document.querySelector(".ramp"), low = document.querySelector(".low"), high = document.querySelector(".high");
  // above its middle a number is blue, below it orange; text stays readable on the strongest of both
  const blue = share => `rgba(38, 120, 214, ${0.6 * share})`, orange = share => `rgba(226, 116, 22, ${0.6 * share})`;
  const middle = name => (name === "ratio" ? 1 : 0);
  const shown = x => x.toFixed(Math.abs(x) < 0.01 && x !== 0 ? 4 : 2).replace("-", "−");

  function shade(name) {
    const at = middle(name), values = tokens.map(t => parseFloat(t.dataset[name]));
    const widest = Math.max(1e-9, ...values.filter(Number.isFinite).map(v => Math.abs(v - at)));
    tokens.forEach((token, i) => {
      const v = values[i] - at, share = Math.abs(v) / widest;
      token.style.backgroundColor = Number.isFinite(v) ? (v >= 0 ? blue(share) : orange(share)) : "";
    });
    low.textContent = shown(at - widest);
    high.textContent = shown(at + widest);
    ramp.style.background = `linear-gradient(to right, ${orange(1)}, transparent, ${blue(1)})`;
  }

  let held = null;
  function open(token) {
    for (const other of tokens) {
      const mine = other === token;
      other.setAttribute("aria-expanded", mine);
      document.getElementById(other.getAttribute("aria-controls")).hidden = !mine;
    }
  }
  tokens.forEach((token, i) => {
    token.addEventListener("mouseenter", () => held === null && open(token));
    token.addEventListener("focus", () => open(token));
    // a token that was clicked stays open while the mouse goes on to read
    token.addEventListener("click", () => { held = held === token ? null : token; open(token); });
    token.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step && tokens[i + step]) { held = null; tokens[i + step].focus(); event.preventDefault(); }
    });
  });
  document.querySelectorAll("input[name=shade]").forEach(input => input.addEventListener("change", () => shade(input.value)));
  if (tokens.length) {
    shade(document.querySelector("input[name=shade]:checked").value);
    open(tokens[tokens.length - 1]);
  }
})();
