// What a reader can do with the page; without it, everything is there at once.
"use strict";
(() => {
  // One of several tables at a time.
  let tabs = 0;
  for (const group of document.querySelectorAll(".alternatives")) {
    const panels = [...group.children];
    const bar = document.createElement("div");
    bar.className = "switch";
    bar.setAttribute("role", "tablist");
    bar.setAttribute("aria-label", group.dataset.label);
    const buttons = panels.map((panel) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = panel.dataset.title;
      button.setAttribute("role", "tab");
      button.id = `tab-${++tabs}`;
      panel.id = `panel-${tabs}`;
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", button.id);
      button.setAttribute("aria-controls", panel.id);
      bar.append(button);
      return button;
    });
    const select = (chosen) => buttons.forEach((button, at) => {
      button.setAttribute("aria-selected", String(at === chosen));
      button.tabIndex = at === chosen ? 0 : -1;
      panels[at].hidden = at !== chosen;
    });
    buttons.forEach((button, at) => {
      button.addEventListener("click", () => select(at));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = (at + step + buttons.length) % buttons.length;
        select(next);
        buttons[next].focus();
      });
    });
    group.prepend(bar);
    select(0);
  }

  // Tables sort by the numbers of a column.
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    if (!body || body.rows.length < 3) continue;
    [...table.tHead.rows[table.tHead.rows.length - 1].cells].forEach((head, column) => {
      const value = (row) => Number(row.cells[column].dataset.value ?? (row.cells[column].textContent.replace("\u2212", "-").replaceAll(",", "") || NaN));
      if (![...body.rows].some((row) => !Number.isNaN(value(row)))) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        const key = (row) => (Number.isNaN(value(row)) ? Infinity : (up ? 1 : -1) * value(row));
        table.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        body.append(...[...body.rows].sort((a, b) => key(a) - key(b) || 0));
      });
    });
  }

  // Copying, also where the clipboard has no programming interface.
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      let done = true;
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch {
        getSelection().selectAllChildren(source);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Select and copy";
      button.nextElementSibling.textContent = done ? "The command is on the clipboard." : "";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // On a phone, a caption is its first sentence until a reader wants the rest.
  for (const rest of document.querySelectorAll("figcaption .rest")) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "more", textContent: "More" });
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "Less" : "More";
    });
    rest.before(button);
  }

  // A figure as a file: the drawing in its own colours, which those of the page replace only here.
  for (const files of document.querySelectorAll(".files")) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "SVG" });
    files.append(" ", button);
    // A table shared with an earlier figure is in the page once.
    const shared = files.querySelector("a[href^='#']");
    if (shared) Object.assign(shared, { href: document.querySelector(`${shared.hash} .files a`).href, download: `${files.dataset.name}.csv` });
    button.addEventListener("click", () => {
      const drawn = [...files.closest("figure").querySelectorAll(".plot svg")].find((one) => one.getBoundingClientRect().width > 0);
      const copy = drawn.cloneNode(true);
      copy.setAttribute("font-family", "sans-serif");
      copy.setAttribute("font-size", "11px");
      const href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
      Object.assign(document.createElement("a"), { href, download: `${files.dataset.name}.svg` }).click();
      setTimeout(() => URL.revokeObjectURL(href), 1000);
    });
  }

  // A link into a folded section opens it.
  const unfold = () => {
    const target = document.getElementById(location.hash.slice(1))?.closest("details");
    if (target) target.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();

  // What a mark stands for.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const point = (event) => {
    const mark = event.target instanceof Element && event.target.closest(".plot svg [aria-label]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("aria-label");
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY - box.height - 12 < 8 ? event.clientY + 18 : event.clientY - box.height - 12}px`;
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // The link of the section in view.
  const links = new Map([...document.querySelectorAll("nav .links a")].map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const [id, link] of links) id === entry.target.id ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));

  // Paper shows everything.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
})();
