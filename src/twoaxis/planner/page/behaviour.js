// Reads the choice of the reader, computes with `formulas`, and shows the result; without it the page shows where the plan starts.
"use strict";
(() => {
  const root = document.documentElement;
  const { tables, choice: first, view: seen, widths } = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("controls");
  const warning = document.getElementById("refusal");
  const results = document.getElementById("results");

  // What is chosen.
  const valueOf = (control) => (control.type === "range" ? JSON.parse(control.dataset.values)[control.value] : control.value);
  const readChoice = () => {
    const choice = { ...first };
    for (const name of Object.keys(choice)) {
      const value = valueOf(form.elements[name]);
      choice[name] = name === "device" ? Number(value) : value;
    }
    return choice;
  };
  const readView = () => ({ goal: form.elements.goal.value, chosen: Number(form.elements.chosen.value) });
  const showValue = (control) => {
    if (control.type !== "range") return;
    const text = JSON.parse(control.dataset.texts)[control.value];
    form.querySelector(`output[for="${control.id}"]`).textContent = text;
    control.setAttribute("aria-valuetext", text);
  };

  // Methods that fit depend on the depth and on the tensor ranks.
  const listMethods = (choice, view) => {
    const fitting = formulas.methods_of(tables, choice);
    const kept = fitting.includes(view.chosen) ? view.chosen : fitting[0];
    form.elements.chosen.replaceChildren(...fitting.map((method) => {
      const text = tables.methods[method].name;
      return Object.assign(document.createElement("option"), { value: method, textContent: text, selected: method === kept });
    }));
    view.chosen = kept;
  };

  // One plan at a time: what is computed for a choice that has changed since is dropped.
  let turn = 0;
  let rows = null;
  let planned = "";
  const pause = () => new Promise((go) => { setTimeout(go); });
  const plan = async () => {
    const mine = ++turn;
    root.dataset.state = "computing";
    const choice = readChoice();
    const view = readView();
    listMethods(choice, view);
    const reason = formulas.refusal(choice, tables.devices[choice.device], tables.layers[choice.layers]);
    warning.textContent = reason;
    warning.hidden = reason === "";
    results.classList.toggle("refused", reason !== "");
    if (reason === "") {
      const asked = JSON.stringify(choice);
      if (asked !== planned) {
        const found = [];
        let since = performance.now();
        for (const method of formulas.methods_of(tables, choice)) {
          found.push(formulas.method_row(tables, choice, method));
          if (performance.now() - since < 30) continue;
          await pause();
          if (mine !== turn) return;
          since = performance.now();
        }
        rows = found;
        planned = asked;
      }
      show(choice, view);
    }
    root.dataset.state = "ready";
  };
  const show = (choice, view) => {
    const step = formulas.step_of(tables, choice, view.chosen);
    for (const [name, both] of Object.entries(widths)) {
      const plots = document.querySelectorAll(`#${name} .plot`);
      both.forEach((width, at) => { plots[at].innerHTML = formulas.figure(tables, choice, rows, step, view, name, width); });
    }
    document.getElementById("facts").replaceChildren(...formulas.facts(choice, rows, step, view).map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
      pair.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return pair;
    }));
    document.querySelector("#best tbody").innerHTML = formulas.best_rows(tables, choice, rows, view);
    document.querySelector("#numbers tbody").innerHTML = formulas.table_rows(tables, choice, rows, view);
    document.getElementById("advice").textContent = formulas.advice(tables, choice, rows, view.goal);
    document.querySelectorAll(".evidence").forEach((one) => { one.hidden = ![one.dataset.goal, "all"].includes(view.goal); });
    window.plan = { choice, view, rows, step };
  };

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    showValue(event.target);
    plan();
  });
  form.addEventListener("reset", () => setTimeout(() => {
    listMethods(first, seen);
    form.elements.chosen.value = seen.chosen;
    [...form.elements].forEach(showValue);
    plan();
  }));
  // A figure is a way to the method in detail, too.
  results.addEventListener("click", (event) => {
    const mark = event.target.closest("[data-method]");
    if (!mark || results.classList.contains("refused")) return;
    form.elements.chosen.value = mark.dataset.method;
    plan();
  });

  // What a line stands for.
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    const mark = event.target instanceof Element && event.target.closest("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY - tip.offsetHeight - 12 < 8 ? event.clientY + 18 : event.clientY - tip.offsetHeight - 12}px`;
  });

  // Paper shows everything.
  addEventListener("beforeprint", () => document.querySelectorAll("main details").forEach((one) => { one.open = true; }));

  // Browsers keep what was set when a page is loaded once more.
  form.reset();
  if (matchMedia("(max-width: 60rem)").matches) document.querySelector("aside details").open = false;
})();
