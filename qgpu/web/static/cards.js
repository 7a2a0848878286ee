// A pGPU in the overview, and its section with a timeline and a table of pods. Everything is updated in place.

import { bytes, clock, duration, inOrder, percent, put, tell, whole } from '/format.js';
import { Timeline, spark, spoken } from '/timeline.js';

const made = id => document.getElementById(id).content.firstElementChild.cloneNode(true);
// A pod below its quota gets too little only if it waits; else it asks for less, or its policy guarantees no quota.
const short = pod => pod.below_now && pod.below_quota_reason.startsWith('waits');
const FULL = 0.95; // the part of a memory limit above which the next allocation may be refused
const sum = (pods, of) => pods.reduce((total, pod) => total + of(pod), 0);

export class Card {
  #rows = new Map();

  constructor(index, policies, changed) {
    this.index = index;
    this.tile = made('tile');
    this.tile.href = `#gpu-${index}`;
    this.section = made('gpu');
    this.section.id = `gpu-${index}`;
    this.section.dataset.gpu = index;
    const heading = this.section.querySelector('h2');
    heading.id = `name-${index}`;
    this.section.setAttribute('aria-labelledby', heading.id);
    this.timeline = new Timeline(this.section.querySelector('.chart'));
    const where = index ? ` --gpu ${index}` : '';
    put(this.section.querySelector('.empty code'), `qgpuctl run${where} --cores 50 -- COMMAND`);
    const group = this.section.querySelector('.policies');
    group.setAttribute('aria-label', `policy of pGPU ${index}`);
    for (const policy of policies) {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = policy;
      button.disabled = !changed;
      button.title = changed ? `share pGPU ${index} by ${policy}` : 'to change policies: qgpuctl web --allow-changes';
      if (changed) button.addEventListener('click', () => changed(index, policy));
      group.append(button);
    }
  }

  show(gpu, pods, colours) {
    this.seen = { gpu, pods: inOrder(pods) };
    const used = Math.min(1, sum(pods, pod => pod.share));
    const held = sum(pods, pod => pod.held);
    const below = pods.filter(short).length;
    const [busy, memory] = [utilization(gpu), `${bytes(held)} of ${bytes(gpu.memory)}`];
    put(this.section.querySelector('h2'), `pGPU ${gpu.index} · ${gpu.name}`);
    put(this.section.querySelector('.facts'), [
      `${percent(used, 0)} of its time used`, busy, memory, `period ${duration(gpu.period_ns)}`,
      `online pods by ${gpu.online_policy}`,
    ].filter(Boolean).map(whole).join(' · '));
    this.#problem(gpu.problem);
    for (const button of this.section.querySelectorAll('.policies button'))
      button.setAttribute('aria-pressed', button.textContent === gpu.policy);
    put(this.tile.querySelector('b'), `pGPU ${gpu.index}`);
    put(this.tile.querySelector('.model'), gpu.name);
    put(this.tile.querySelector('.figures'), [`${percent(used, 0)} used`, busy].filter(Boolean).join(' · '));
    put(this.tile.querySelector('.memory'), memory);
    this.tile.querySelector('.meter i').style.width = `${Math.min(100, 100 * held / gpu.memory)}%`;
    this.tile.classList.toggle('bad', Boolean(gpu.problem) || below > 0);
    put(this.tile.querySelector('.state'), gpu.problem ? 'not shared at the moment'
      : `${pods.length} ${pods.length === 1 ? 'pod' : 'pods'}${below ? `, ${below} below quota` : ''} · ${gpu.policy}`);
    this.#table(colours);
  }

  // The daemon no longer lists this pGPU. Its last state stays, marked as old.
  missing(at) {
    const text = `pGPU ${this.index} is gone; last seen at ${clock(at)}`;
    this.#problem(text, true);
    this.tile.classList.add('bad');
    put(this.tile.querySelector('.state'), text);
  }

  draw(points, span, now, colours) {
    const pods = this.seen.pods;
    this.timeline.chart.hidden = !pods.length && !points.some(point => Object.keys(point.shares).length);
    this.timeline.draw(points, span, now, pods.map(pod => pod.pod), colours);
    spark(this.tile.querySelector('path'), points, span, now);
    spoken(this.timeline.chart, this.index, pods, span);
  }

  #problem(text, gone = false) {
    tell(this.section.querySelector('.problem'), text);
    this.section.classList.toggle('gone', gone);
    this.tile.classList.toggle('gone', gone);
  }

  #table(colours) {
    const pods = this.seen.pods;
    this.section.querySelector('.empty').hidden = pods.length > 0;
    this.section.querySelector('table').hidden = pods.length === 0;
    const body = this.section.querySelector('tbody');
    for (const [name, row] of this.#rows)
      if (!pods.some(pod => pod.pod === name)) { row.remove(); this.#rows.delete(name); }
    pods.forEach((pod, place) => {
      if (!this.#rows.has(pod.pod)) this.#rows.set(pod.pod, made('pod'));
      const row = this.#rows.get(pod.pod);
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null); // only if it is elsewhere
      showPod(row, pod, colours.of(pod.pod));
    });
  }
}

const utilization = gpu => (gpu.utilization ?? null) === null ? '' : `${percent(gpu.utilization, 0)} utilization`;

function showPod(row, pod, colour) {
  const cell = name => row.querySelector(name);
  row.className = `${pod.busy ? '' : 'idle'}${short(pod) || pod.problem ? ' bad' : ''}`;
  put(cell('.text'), pod.pod);
  put(cell('.class'), pod.class === 'online' ? 'online' : '');
  cell('.swatch').style.background = cell('.got').style.background = colour;
  cell('.got').style.width = `${pod.share * 100}%`;
  const asked = cell('.asked');
  asked.hidden = pod.cores === null;
  asked.style.left = `min(${pod.cores}%, 100% - 2px)`;
  put(cell('.got-number'),
    percent(pod.share) + (pod.cores === null ? '' : ` of ${pod.cores} %`) + (pod.busy ? '' : ', idle'));
  put(cell('.gate'), (pod.gated ?? null) === null ? '–' : percent(pod.gated));
  put(cell('.wait'), wait(pod));
  cell('.wait').classList.toggle('unknown', cell('.wait').textContent === '–');
  put(cell('.memory'), bytes(pod.held) + (pod.memory === null ? '' : ` of ${bytes(pod.memory)}`));
  cell('.memory').classList.toggle('full', pod.memory !== null && pod.held > FULL * pod.memory);
  tell(cell('.note'), [place(pod), pod.below_now ? `below its quota: ${pod.below_quota_reason}` : '', pod.problem]
    .filter(Boolean).join('; '));
}

// Where a pod is while it is not on its card, and how much of its memory lies in host memory.
function place(pod) {
  const state = pod.state ?? 'running';
  if (state === 'running') return '';
  const away = ['suspended', 'waiting'].includes(state) ? 'in host memory' : 'on the way';
  return pod.suspended_memory ? `${state}, ${bytes(pod.suspended_memory)} ${away}` : state;
}

function wait(pod) {
  const expected = pod.expected_wait_p99_ns ?? null;
  const target = pod.latency_target_ns === null ? '' : ` of ${duration(pod.latency_target_ns)}`;
  return expected === null ? (target ? `?${target}` : '–') : `≈ ${duration(expected)}${target}`;
}
