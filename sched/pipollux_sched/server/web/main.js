// The page: token, bar, and current view.

import { token } from "./api.js";
import { h, say } from "./dom.js";
import { moment } from "./format.js";
import { JobPage } from "./job.js";
import { Live } from "./live.js";
import { login } from "./login.js";
import { Overview } from "./overview.js";
import { place } from "./place.js";

const TICK_MS = 1000;
const CALM_TICKS = 10;

const bar = document.getElementById("bar");
const main = document.getElementById("main");
const state = h("span", { class: "state", role: "status" });
const policy = h("span", { class: "policy" });
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let live = null;
let page = null;
let ticks = 0;

function takeToken() {
  const given = location.hash.match(/^#token=([A-Za-z0-9_-]{1,200})$/);
  if (!given) return false;
  token.keep(given[1]);
  history.replaceState(null, "", "#/");
  return true;
}

function close() {
  live?.stop();
  page?.leave?.();
  [live, page] = [null, null];
}

function leave(wrong = false) {
  close();
  token.forget();
  bar.replaceChildren();
  document.title = "Admin token · Pipollux";
  main.replaceChildren(login(open, wrong));
}

function open() {
  bar.replaceChildren(
    h("a", { href: "#/", class: "mark" }, "Pipollux"), policy, state,
    h("nav", {}, h("a", { href: "/docs" }, "REST"), h("button", { type: "button", class: "quiet", click: () => leave() }, "Forget token")),
  );
  live = new Live();
  live.addEventListener("update", update);
  live.addEventListener("refused", () => leave(true));
  route();
  live.start();
}

function route() {
  if (takeToken()) {
    close();
    return open();
  }
  if (!live) return undefined;
  const there = place();
  if (page?.moved?.(there)) return undefined;
  page?.leave?.();
  page = there.job ? new JobPage(live, there.job) : new Overview(live);
  document.title = page.title;
  main.replaceChildren(page.element);
  scrollTo(0, 0);
  live.refresh();
  return update();
}

function update() {
  if (!live) return;
  const away = live.awaySince !== null;
  state.className = away ? "state away" : "state";
  const since = away ? moment(live.awaySince) : "";
  if (!away) say(state, live.data ? "live" : "");
  else if (live.trouble) say(state, `The scheduler has refused requests since ${since}: ${live.trouble}; retrying`);
  else say(state, `The scheduler has not answered since ${since}; retrying`);
  main.classList.toggle("stale", away);
  if (live.data) say(policy, `${live.data.policy} policy`);
  if (live.data) page.update();
  if (document.title !== page.title) document.title = page.title;
}

setInterval(() => {
  ticks += 1;
  if (live?.data && !document.hidden && (!calm.matches || ticks % CALM_TICKS === 0)) page.draw();
}, TICK_MS);
addEventListener("hashchange", route);
takeToken();
if (token.get()) open();
else leave();
