// The page: takes moments from the daemon's watcher and shows them. Text from outside is only ever set as text.

import { draw } from '/timeline.js';

const COLOURS = 8;
const KEEP = 330;

const byId = id => document.getElementById(id);
const token = takeToken();
const cards = new Map();
let moments = [];

// Behind '#', so that no server and no log sees it; out of the address bar as soon as it is read.
function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get('token');
  if (found) {
    sessionStorage.setItem('token', found);
    history.replaceState(null, '', location.pathname);
  }
  return sessionStorage.getItem('token');
}

function listen() {
  const events = new EventSource('/events');
  events.addEventListener('past', event => {
    moments = JSON.parse(event.data);
    show();
  });
  events.addEventListener('moment', event => {
    moments = [...moments, JSON.parse(event.data)].slice(-KEEP);
    show();
  });
  events.onerror = () => live(false, 'lost; trying again');
}

function live(on, text) {
  byId('live').className = `live ${on ? 'on' : 'off'}`;
  byId('live').textContent = text;
}

function show() {
  const moment = moments[moments.length - 1];
  if (!moment) return;
  live(!moment.trouble, moment.trouble ? 'no daemon' : 'live');
  tell(byId('trouble'), moment.trouble);
  if (moment.trouble) return;
  byId('about').textContent = `${location.hostname || 'this host'} · plane ${moment.plane} · ${moment.version}`;
  for (const gpu of moment.gpus) showGpu(gpu, moment.pods.filter(pod => pod.gpu === gpu.index));
}

function tell(element, text) {
  element.hidden = !text;
  element.textContent = text;
}

function card(index) {
  if (cards.has(index)) return cards.get(index);
  const section = byId('gpu').content.firstElementChild.cloneNode(true);
  section.dataset.gpu = index;
  const found = { section, rows: new Map(), colours: new Map(), hover: null };
  for (const policy of moments[moments.length - 1].policies) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = policy;
    button.disabled = !token;
    button.title = token ? `share pGPU ${index} by ${policy}` : 'to change policies: qgpuctl web --allow-changes';
    button.addEventListener('click', () => setPolicy(index, policy));
    section.querySelector('.policies').append(button);
  }
  const canvas = section.querySelector('canvas');
  canvas.addEventListener('mousemove', event => { found.hover = event.offsetX; timeline(index); });
  canvas.addEventListener('mouseleave', () => { found.hover = null; timeline(index); });
  byId('gpus').append(section);
  cards.set(index, found);
  return found;
}

function timeline(index) {
  const { section, colours, hover } = card(index);
  const style = getComputedStyle(document.documentElement);
  const shown = new Map([...colours].map(([pod, n]) => [pod, style.getPropertyValue(`--c${n}`).trim()]));
  draw(section.querySelector('canvas'), moments, index, shown, hover);
}

function showGpu(gpu, pods) {
  const { section, rows, colours } = card(gpu.index);
  section.querySelector('h2').textContent = `pGPU ${gpu.index} · ${gpu.name}`;
  const used = pods.reduce((sum, pod) => sum + pod.share, 0);
  section.querySelector('.facts').textContent =
    `${percent(used)} of its time in use · ${bytes(gpu.memory)} · period ${gpu.period_ns / 1e6} ms` +
    ` · online pods by ${gpu.online_policy}`;
  tell(section.querySelector('.trouble'), gpu.trouble);
  for (const button of section.querySelectorAll('.policies button'))
    button.setAttribute('aria-pressed', button.textContent === gpu.policy);
  for (const moment of moments)
    for (const pod of moment.pods)
      if (pod.gpu === gpu.index && !colours.has(pod.pod)) colours.set(pod.pod, colours.size % COLOURS);
  section.querySelector('.empty').hidden = pods.length > 0;
  section.querySelector('table').hidden = pods.length === 0;
  const body = section.querySelector('tbody');
  for (const pod of pods) {
    if (!rows.has(pod.pod)) rows.set(pod.pod, byId('pod').content.firstElementChild.cloneNode(true));
    showPod(rows.get(pod.pod), pod, colours.get(pod.pod));
    body.append(rows.get(pod.pod));
  }
  for (const [name, row] of rows)
    if (!pods.some(pod => pod.pod === name)) { row.remove(); rows.delete(name); }
  timeline(gpu.index);
}

function showPod(row, pod, colour) {
  row.className = pod.busy ? '' : 'idle';
  row.querySelector('.name span').textContent = pod.pod;
  row.querySelector('.sub').textContent = pod.trouble;
  row.querySelector('.swatch').style.background = row.querySelector('.got').style.background = `var(--c${colour})`;
  row.querySelector('.class').textContent =
    pod.class + (pod.latency_target_ns ? `, + ${pod.latency_target_ns / 1e6} ms at most` : '');
  row.querySelector('.got').style.width = `${pod.share * 100}%`;
  const asked = row.querySelector('.asked');
  asked.hidden = pod.cores === null;
  asked.style.left = `${pod.cores}%`;
  asked.title = `asked for ${pod.cores} %`;
  row.querySelector('.number').textContent =
    percent(pod.share) + (pod.cores === null ? '' : ` of ${pod.cores} %`) + (pod.busy ? '' : ' · idle');
  row.querySelector('td.memory').textContent = bytes(pod.held) + (pod.memory === null ? '' : ` of ${bytes(pod.memory)}`);
}

async function setPolicy(gpu, policy) {
  const answer = await fetch('/policy', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', Authorization: `Bearer ${token}` },
    body: JSON.stringify({ gpu, policy }),
  }).then(response => response.json(), error => ({ trouble: String(error) }));
  tell(byId('trouble'), answer.trouble);
}

const percent = share => `${(share * 100).toFixed(1)} %`.replace(' %', '\u202f%').replace(/^100\.0/, '100');

function bytes(size) {
  let unit = 0;
  while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}`;
}

function theme(chosen) {
  document.documentElement.dataset.theme = chosen;
  localStorage.setItem('theme', chosen);
  for (const index of cards.keys()) timeline(index);
}

const dark = matchMedia('(prefers-color-scheme: dark)');
theme(localStorage.getItem('theme') || (dark.matches ? 'dark' : 'light'));
byId('theme').addEventListener('click', () => theme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
byId('mode').textContent = token ? 'This page may switch policies.' : 'This page only shows. To switch policies: qgpuctl web --allow-changes';
addEventListener('resize', () => { for (const index of cards.keys()) timeline(index); });
listen();
