// The frame around both views: model, key, theme, tabs.

import { getJson, key, setKey } from "/ui/api.js";
import { startChat } from "/ui/chat.js";
import { byId, make, notice } from "/ui/dom.js";
import { showEngine } from "/ui/engine.js";

const THEME = "headrace.theme";

async function loadModels() {
  const chooser = byId("model");
  try {
    const { data } = await getJson("/v1/models");
    chooser.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    notice("");
  } catch (error) {
    if (error.status === 401) askKey("This server asks for an API key.");
    else notice(`The models cannot be listed: ${error.message}`);
  }
}

function askKey(why) {
  if (why) notice(why);
  byId("key").value = key();
  byId("key-dialog").showModal();
}

function show(view) {
  for (const each of ["chat", "engine"]) byId(each).hidden = each !== view;
  for (const tab of document.querySelectorAll(".tab")) tab.setAttribute("aria-pressed", String(tab.dataset.view === view));
  showEngine(view === "engine");
  history.replaceState(null, "", view === "chat" ? "/" : `#${view}`);
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function switchTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  const theme = dark ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  applyTheme(theme);
}

applyTheme(localStorage.getItem(THEME));
byId("theme").addEventListener("click", switchTheme);
byId("key-button").addEventListener("click", () => askKey());
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "save") return;
  setKey(byId("key").value.trim());
  loadModels();
});
for (const tab of document.querySelectorAll(".tab")) tab.addEventListener("click", () => show(tab.dataset.view));
startChat(() => byId("model").value);
loadModels();
show(location.hash === "#engine" ? "engine" : "chat");
