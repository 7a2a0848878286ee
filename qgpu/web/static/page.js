// The page: takes moments from the server's stream and the past hour from the daemon, and shows them.
// Text from outside is set only as text, never as HTML.

import { Card } from '/cards.js';
import { Colours, inOrder, put, tell } from '/format.js';
import { points } from '/series.js';

const KEEP = 330; // moments, one a second
const PAST_EVERY_MS = 60_000;

const byId = id => document.getElementById(id);
const token = takeToken();
const cards = new Map();
const colours = new Colours();
let moments = [];
const below = new Set(); // pods below their quota, as shown
const past = {}; // by pGPU
let span = 300;
let wasLive = null;

// The token comes after '#', so that no server or log sees it, and leaves the address bar once it is read.
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
    fetchPast();
    show(null);
  });
  events.addEventListener('moment', event => {
    const before = moments[moments.length - 1];
    moments = [...moments, JSON.parse(event.data)].slice(-KEEP);
    show(before);
  });
  events.onerror = () => live(false, 'lost; trying again');
}

async function fetchPast() {
  const answer = await fetch('/history').catch(() => ({ ok: false }));
  if (!answer.ok) return; // the stream says what is wrong
  const found = await answer.json();
  for (const [index, fresh] of Object.entries(found)) past[index] = joined(past[index], fresh);
  draw();
}

// A daemon that has just started does not know earlier moments, but this page does.
function joined(old, fresh) {
  const from = fresh.points.length ? fresh.points[0].at : Infinity;
  const kept = (old ? old.points : []).filter(point => point.at < from && point.at > Date.now() / 1000 - 3600);
  return { ...fresh, points: [...kept, ...fresh.points] };
}

function live(on, text) {
  byId('live').className = `live ${on ? 'on' : 'off'}`;
  document.body.classList.toggle('stale', !on);
  put(byId('live'), text);
  if (wasLive !== null && wasLive !== text) say(text);
  wasLive = text;
}

// For screen readers: only what changed, at most once a second.
const say = text => put(byId('said'), text);

function show(before) {
  const moment = moments[moments.length - 1];
  if (!moment) return;
  live(!moment.problem, moment.problem ? 'no daemon' : 'live');
  tell(byId('problem'), moment.problem);
  if (moment.problem) return;
  put(byId('about'), `${location.hostname || 'this host'} · plane ${moment.plane} · ${moment.version}`);
  colours.update(moment.pods);
  settle(moment.pods);
  for (const gpu of moment.gpus) card(gpu.index, moment).show(gpu, moment.pods.filter(pod => pod.gpu === gpu.index), colours);
  for (const [index, gone] of cards)
    if (!moment.gpus.some(gpu => gpu.index === index)) gone.missing(lastSeen(index));
  if (before && !before.problem) announce(before, moment);
  draw();
}

function card(index, moment) {
  if (!cards.has(index)) {
    const found = new Card(index, moment.policies, token ? askPolicy : null);
    cards.set(index, found);
    byId('overview').append(found.tile);
    byId('gpus').append(found.section);
  }
  return cards.get(index);
}

function lastSeen(index) {
  const found = moments.findLast(moment => moment.gpus.some(gpu => gpu.index === index));
  return found ? found.at : moments[0].at;
}

function draw() {
  if (!moments.length) return;
  const now = moments[moments.length - 1].at;
  for (const [index, each] of cards) each.draw(points(past[index], moments, index, span, now), span, now, colours);
}

// Shares near 95 % of a quota cross it all the time. So marks change only when most of the last seconds agree. A pod
// that has had its whole quota, or no work, for two seconds is not marked.
function settle(pods) {
  const recent = moments.slice(-10);
  for (const pod of pods) {
    const key = `${pod.gpu} ${pod.pod}`;
    const same = each => each.gpu === pod.gpu && each.pod === pod.pod && each.below_quota;
    const times = recent.map(moment => moment.pods.find(same)).filter(Boolean);
    const well = moment => moment.pods.some(each => each.gpu === pod.gpu && each.pod === pod.pod && content(each));
    const again = recent.length > 1 && recent.slice(-2).every(well);
    const on = !again && (below.has(key) ? times.length > 0.3 * recent.length : times.length > 0.6 * recent.length);
    if (on) below.add(key);
    else below.delete(key);
    if (on && !pod.below_quota) pod.below_quota_reason = times[times.length - 1].below_quota_reason;
    pod.below_now = on;
  }
}

const content = pod => !pod.busy || pod.cores === null || pod.share >= pod.cores / 100;

function announce(before, after) {
  const names = pods => new Set(inOrder(pods).map(pod => pod.pod));
  const [were, are] = [names(before.pods), names(after.pods)];
  const short = moment => new Set(moment.pods.filter(pod => pod.below_now).map(pod => pod.pod));
  const fewest = (list, what) => list.length && `${list.length > 3 ? `${list.length} pods` : list.join(', ')} ${what}`;
  const news = [
    fewest([...are].filter(pod => !were.has(pod)), 'came'),
    fewest([...were].filter(pod => !are.has(pod)), 'went'),
    fewest([...short(after)].filter(pod => !short(before).has(pod)), 'below quota'),
    ...after.gpus.map(gpu => {
      const old = before.gpus.find(each => each.index === gpu.index);
      return old && old.policy !== gpu.policy && `pGPU ${gpu.index}: ${gpu.policy}`;
    }),
  ].filter(Boolean);
  if (news.length) say(news.join('; '));
}

function askPolicy(gpu, policy) {
  const old = cards.get(gpu).seen.gpu.policy;
  if (old === policy) return;
  put(byId('question'), `Share pGPU ${gpu} by ${policy} instead of ${old}? It takes effect at once, and lasts.`);
  const ask = byId('ask');
  ask.returnValue = '';
  ask.onclose = () => { if (ask.returnValue === 'yes') setPolicy(gpu, policy); };
  ask.showModal();
}

async function setPolicy(gpu, policy) {
  const answer = await fetch('/policy', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', Authorization: `Bearer ${token}` },
    body: JSON.stringify({ gpu, policy }),
  }).then(response => response.json(), error => ({ problem: String(error) }));
  tell(byId('problem'), answer.problem);
}

// The system's theme, until the user chooses one.
const THEMES = ['', 'light', 'dark'];

function theme(chosen, keep) {
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  if (keep && chosen) localStorage.setItem('theme', chosen);
  else if (keep) localStorage.removeItem('theme');
  put(byId('theme'), { '': '◐', light: '☀', dark: '☾' }[chosen]);
  byId('theme').title = `theme: ${chosen || "the system's"}`;
  byId('theme').setAttribute('aria-label', byId('theme').title);
}

theme(localStorage.getItem('theme') || '', false);
byId('theme').addEventListener('click', () =>
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || '') + 1) % THEMES.length], true));
for (const button of document.querySelectorAll('#spans button'))
  button.addEventListener('click', () => {
    span = Number(button.dataset.span);
    for (const each of document.querySelectorAll('#spans button')) each.setAttribute('aria-pressed', each === button);
    draw();
  });
if (token) put(byId('mode'), 'This page may switch policies.');
setInterval(fetchPast, PAST_EVERY_MS);
listen();
