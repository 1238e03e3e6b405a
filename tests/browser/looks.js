// What is seen of a page. Colours are laid over each other as the browser does it, opacity included.
const rgba = (text) => {
  const n = text.match(/[\d.]+/g).map(Number);
  return { r: n[0], g: n[1], b: n[2], a: n.length > 3 ? n[3] : 1 };
};
const mix = (under, over, share) => ({
  r: under.r + (over.r - under.r) * share, g: under.g + (over.g - under.g) * share, b: under.b + (over.b - under.b) * share,
});
const luminance = (c) => {
  const part = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(c.r) + 0.7152 * part(c.g) + 0.0722 * part(c.b);
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const canvas = () => {
  const probe = document.createElement("i");
  probe.style.color = "Canvas";
  document.body.append(probe);
  const found = rgba(getComputedStyle(probe).color);
  probe.remove();
  return found;
};
// what lies behind an element's text, and a colour painted there
const painted = (element, colour) => {
  const chain = [];
  for (let e = element; e; e = e.parentElement) chain.unshift(e);
  const layer = (i, under) => {
    const style = getComputedStyle(chain[i]);
    const ground = rgba(style.backgroundColor);
    const inside = mix(under, ground, ground.a);
    const [back, front] = i === chain.length - 1 ? [inside, mix(inside, colour, colour.a)] : layer(i + 1, inside);
    const share = Number(style.opacity);
    return [mix(under, back, share), mix(under, front, share)];
  };
  return layer(0, canvas());
};
const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
  element.getClientRects().length > 0;
const contrasts = () => {
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!seen(element) || element.closest("[disabled], script, style, svg")) continue;
    const own = [...element.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE).map((n) => n.data.trim()).join(" ").trim();
    const text = own || (element.matches("input[type=text], textarea, select") ? element.value || element.name : "");
    if (!text) continue;
    const [back, front] = painted(element, rgba(getComputedStyle(element).color));
    found.push([text.slice(0, 40), contrast(back, front)]);
  }
  return found;
};
const overhang = () => {
  const root = document.documentElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const wide = [...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > root.clientWidth + 0.5);
  return [`${root.scrollWidth} > ${root.clientWidth}: ${wide.map((e) => `${e.tagName}.${e.className}`).slice(0, 5).join(", ")}`];
};
const focusWalk = () => {
  const groups = new Set();
  const wanted = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']")]
    .filter((e) => seen(e) && !e.disabled)
    // Tab goes to one radio of a group
    .filter((e) => e.type !== "radio" || (!groups.has(e.name) && groups.add(e.name)));
  const reached = new Set();
  const name = (e) => `${e.tagName.toLowerCase()} ${(e.innerText || e.name || "").slice(0, 30)}`;
  return {
    count: () => wanted.length,
    step: () => {
      const at = document.activeElement;
      if (!at || at === document.body) return [];
      if (reached.has(at)) return null;
      reached.add(at);
      if (at.type === "radio") for (const e of wanted) if (e.name === at.name) reached.add(e);
      const style = getComputedStyle(at);
      const there = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
      if (!there) return [name(at), 1];
      // the outline lies around the element, on what is behind it
      const [back, front] = painted(at.parentElement, rgba(style.outlineColor));
      return [name(at), contrast(back, front)];
    },
    missed: () => wanted.filter((e) => !reached.has(e)).map(name),
  };
};
