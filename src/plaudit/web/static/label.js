// Keys, and the time a question was looked at. Without this file the page works by its buttons.
"use strict";
(() => {
  const plain = (event) => !(event.ctrlKey || event.metaKey || event.altKey || event.repeat);
  // models take their seconds to answer: the button says so, and works once
  const ask = document.getElementById("ask");
  if (ask) ask.addEventListener("submit", () => {
    const button = ask.querySelector("button");
    setTimeout(() => { button.textContent = button.dataset.wait; }, 0);
  });

  // one answer or one undo a page, however often a key is pressed while it is on its way
  let sent = false;
  document.addEventListener("submit", (event) => {
    if (sent) { event.preventDefault(); return; }
    sent = true;
    // after the form was read, so that the button that was pressed is sent with it
    setTimeout(() => { for (const b of document.querySelectorAll("button")) b.disabled = true; }, 0);
  });
  // a page that comes back from the browser's memory can be used again
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

  const press = (selector) => { const b = document.querySelector(selector); if (b) b.click(); };
  const form = document.getElementById("question");
  if (!form) {
    document.addEventListener("keydown", (event) => {
      if (plain(event) && event.key.toLowerCase() === "u") press("#undo button");
    });
    return;
  }
  const mode = form.dataset.mode;
  const seconds = form.elements.seconds;
  let looked = 0, since = document.hidden ? null : performance.now();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && since !== null) { looked += performance.now() - since; since = null; }
    else if (!document.hidden && since === null) since = performance.now();
  });

  form.addEventListener("submit", () => {
    seconds.value = ((looked + (since === null ? 0 : performance.now() - since)) / 1000).toFixed(2);
  });

  const selects = [...form.querySelectorAll("select")];
  const fields = [...form.querySelectorAll("fieldset.stars")];

  // ranking: the next free place goes to an answer; an answer that has one gives it back
  const place = (i) => {
    const s = selects[i];
    if (!s) return;
    if (s.value) { s.value = ""; return; }
    const taken = selects.map((x) => Number(x.value) || 0);
    let next = 1;
    while (taken.includes(next)) next += 1;
    s.value = String(next);
    s.focus();
  };
  const rate = (value) => {
    const open = fields.find((f) => !f.querySelector(":checked")) || fields[fields.length - 1];
    const here = document.activeElement && document.activeElement.closest("fieldset.stars");
    const field = here || open;
    const input = field && field.querySelector(`input[value="${value}"]`);
    if (!input) return;
    input.checked = true;
    const following = fields[fields.indexOf(field) + 1];
    (following ? following.querySelector("input") : form.querySelector("button[value=submit]")).focus();
  };

  document.addEventListener("keydown", (event) => {
    if (!plain(event)) return;
    const at = event.target;
    if (at.matches("textarea, input[type=text]")) {
      if (event.key === "Escape") at.blur();
      return;
    }
    const key = event.key.toLowerCase();
    const digit = /^[1-9]$/.test(key) ? Number(key) : 0;
    if (digit && mode === "rank") place(digit - 1);
    else if (digit && mode === "rate") { if (digit <= 7) rate(digit); }
    else if (digit) press(`button[name=choice][value="${digit}"]`);
    else if (key === "0") press('button[name=choice][value="equal"]');
    else if (key === "b") press('button[name=choice][value="both_bad"]');
    else if (key === "s") press('button[name=choice][value="skip"]');
    else if (key === "u") press("#undo button");
    else if (key === "?") { const d = document.getElementById("keys"); d.open = !d.open; d.querySelector("summary").focus(); }
    else if (key === "enter" && (mode === "rank" || mode === "rate") && !at.matches("button, a, summary")) press("button[value=submit]");
    else return;
    event.preventDefault();
  });
})();
