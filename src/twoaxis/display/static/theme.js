// Light or dark colours: as the system asks until the reader chooses; and a mark that scripts run.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");

  const theme = document.querySelector(".theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  const stored = (write) => {
    // Files opened from a disk may have no storage.
    try { return write ? localStorage.setItem("twoaxis-theme", write) : localStorage.getItem("twoaxis-theme"); } catch { return null; }
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  theme.removeAttribute("aria-pressed");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored(root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
})();
