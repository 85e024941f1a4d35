// The live page: reads the server every second and shows what it says.

import { draw, follow } from "./chart.js";
import { element, show } from "./dom.js";
import { History } from "./history.js";
import { showLearning } from "./learning.js";
import { parse } from "./metrics.js";
import { CHARTS, showDrafters, showErrors, showNumbers, showPositions, showReplicas, showRequests, showSegments, showServer } from "./panels.js";

const PERIOD = 1000;  // milliseconds
const history = new History();
const cards = CHARTS.map(() => element("div", { class: "card" }));
const keyForm = document.getElementById("key"), keyField = document.getElementById("key-value");

function drawCharts() {
  CHARTS.forEach((chart, index) => draw(cards[index], chart, history.points));
}

async function read(path) {
  const key = sessionStorage.getItem("key");
  const answer = await fetch(path, { cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.status === 401) {
    sessionStorage.removeItem("key");
    keyForm.hidden = false;
  }
  if (!answer.ok && path !== "health") throw new Error(answer.status === 401 ? "API key needed" : `/${path} answers ${answer.status}`);
  return answer;
}

async function refresh() {
  const [metrics, requests, health] = await Promise.all(["metrics", "requests", "health"].map(read));
  const [text, { requests: running }, { status }] = [await metrics.text(), await requests.json(), await health.json()];
  keyForm.hidden = true;
  history.add(performance.now(), parse(text));
  const { read: latest } = history.last;
  showServer(latest);
  showNumbers(history);
  drawCharts();
  showRequests(running);
  if (latest.get("server_info")?.[0]?.labels.replicas) showReplicas(await (await read("replicas")).json());
  if (latest.has("learn_head")) showLearning(await (await read("learn")).json());
  showDrafters(latest);
  showPositions(latest);
  showSegments(history);
  showErrors(latest);
  return status;
}

function showState(words, style) {
  const state = document.getElementById("state");
  state.textContent = words;
  state.className = style;
}

async function tick() {
  try {
    const status = await refresh();
    showState(status === "ok" ? "healthy" : status, status === "ok" ? "good" : "bad");
  } catch (error) {
    console.error(error);
    showState(error instanceof TypeError ? "no connection" : error.message, "bad");
  }
  setTimeout(tick, PERIOD);
}

keyForm.addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("key", keyField.value.trim());
  keyField.value = "";
});
window.addEventListener("resize", drawCharts);
cards.forEach(card => follow(card, drawCharts));
show("charts", ...cards);
drawCharts();
tick();
