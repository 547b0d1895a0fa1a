// What is wrong with a page as a person sees it: overlaps, cut text, small text, weak contrast.
(() => {
  const wrong = [];
  const box = (r) => [r.left, r.top, r.right, r.bottom].map(Math.round).join(" ");
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  if (document.scrollingElement.scrollWidth > innerWidth) wrong.push("the page scrolls sideways");
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
  const seen = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, e = node.parentElement, text = node.data.trim();
    if (!text || e.closest("script, style")) continue;
    const style = getComputedStyle(e), drawn = e.closest("svg");
    const size = parseFloat(style.fontSize) * (drawn ? e.getScreenCTM().a : 1);
    if (size < 10) wrong.push(`"${text}" is ${size.toFixed(1)} px`);
    const a = light(rgb(drawn ? style.fill : style.color).slice(0, 3)), b = light(behind(drawn ? drawn.parentElement : e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) wrong.push(`"${text}" has a contrast of ${contrast.toFixed(1)}`);
    const range = document.createRange(); range.selectNodeContents(node);
    const rects = drawn ? [e.getBoundingClientRect()] : [...range.getClientRects()];
    if (e.closest(".scroll, pre")) continue;
    for (const r of rects) {
      if (r.left < 0 || r.right > innerWidth + 0.5) wrong.push(`"${text}" leaves the page (${box(r)})`);
      const card = e.closest(".card, .box");
      const room = (drawn || card || document.body).getBoundingClientRect();
      if (r.left < room.left - 1 || r.right > room.right + 1 || r.top < room.top - 1 || r.bottom > room.bottom + 1)
        wrong.push(`"${text}" is cut (${box(r)} in ${box(room)})`);
      for (const [other, where] of seen) if (meet(r, where)) wrong.push(`"${text}" overlaps "${other}"`);
      seen.push([text, r]);
    }
  }
  for (const mark of document.querySelectorAll("svg use, svg path")) {
    const style = getComputedStyle(mark), r = mark.getBoundingClientRect();
    const card = mark.closest("figure").getBoundingClientRect();
    if (mark.closest("defs") || mark.closest("[clip-path]") || mark.hasAttribute("clip-path")) continue;
    if (r.left < card.left || r.right > card.right) wrong.push(`a mark leaves its card (${box(r)} in ${box(card)})`);
  }
  return {wrong, texts: seen.length, charts: document.querySelectorAll("svg").length,
    columns: new Set([...document.querySelectorAll("figure")].map((f) => Math.round(f.getBoundingClientRect().left))).size};
})()
