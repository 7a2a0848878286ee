// The timeline of one pGPU: pods' shares stacked, changes of policy marked, and a cursor for mouse and arrow keys.

import { clock, percent } from '/format.js';
import { total } from '/series.js';

const LEFT = 44, RIGHT = 6, TOP = 18, BOTTOM = 20;
const ROWS = 12; // at most in the cursor's list

const svg = (name, attributes = {}, text = '') => {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};
const html = (name, text, className = '') => Object.assign(document.createElement(name), { textContent: text, className });

export class Timeline {
  #paths = new Map();
  #layers = ['grid', 'shares', 'marks', 'cursor'].map(name => svg('g', { class: name }));
  #at = null; // the time under the cursor
  #shown = null;

  constructor(chart) {
    this.chart = chart;
    this.svg = chart.querySelector('svg');
    this.tip = chart.querySelector('.tip');
    this.svg.append(...this.#layers);
    chart.addEventListener('pointermove', event => this.#hover(event.clientX - chart.getBoundingClientRect().left));
    chart.addEventListener('pointerleave', () => this.#leave());
    chart.addEventListener('blur', () => this.#leave());
    chart.addEventListener('keydown', event => this.#key(event));
    new ResizeObserver(() => this.#shown && this.draw(...this.#shown)).observe(chart);
  }

  // `pods` lists the names to stack, from the bottom; other names lie on top of them.
  draw(points, span, now, pods, colours) {
    this.#shown = [points, span, now, pods, colours];
    const [width, height] = [this.chart.clientWidth, this.chart.clientHeight];
    if (!width || !height) return;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.x = at => LEFT + (width - LEFT - RIGHT) * (1 - Math.min(1, (now - at) / span));
    this.y = share => TOP + (height - TOP - BOTTOM) * (1 - Math.min(1, share));
    this.#grid(width, now, span);
    this.#stack(points, pods, colours);
    this.#marks(points, width);
    this.#cursor(points, colours, width);
  }

  #grid(width, now, span) {
    const lines = [0, 0.5, 1].flatMap(share => [
      svg('line', { x1: LEFT, x2: width - RIGHT, y1: this.y(share), y2: this.y(share) }),
      svg('text', { x: LEFT - 6, y: this.y(share) + 4, 'text-anchor': 'end' }, `${share * 100}\u202f%`),
    ]);
    const parts = width < 420 ? 2 : span % 240 ? 5 : 4;
    for (let part = 0; part <= parts; part += 1) {
      const ago = span * part / parts;
      const text = ago ? `−${ago % 60 ? (ago / 60).toFixed(2).replace(/0$/, '') : ago / 60} min` : 'now';
      const anchor = part === 0 ? 'end' : part === parts ? 'start' : 'middle';
      lines.push(svg('text', { x: this.x(now - ago), y: this.y(0) + 15, 'text-anchor': anchor }, text));
    }
    this.#layers[0].replaceChildren(...lines);
  }

  #stack(points, pods, colours) {
    const others = new Set(points.flatMap(point => Object.keys(point.shares)));
    for (const pod of pods) others.delete(pod);
    const base = points.map(() => 0);
    const order = [...pods, ...others];
    for (const [pod, path] of this.#paths) if (!order.includes(pod)) { path.remove(); this.#paths.delete(pod); }
    for (const pod of order) {
      if (!this.#paths.has(pod)) this.#paths.set(pod, this.#layers[1].appendChild(svg('path')));
      const path = this.#paths.get(pod);
      path.style.fill = colours.of(pod);
      path.setAttribute('d', this.#area(points, pod, base));
    }
  }

  // Steps, one a point, around those in which the pod had a share. `base` is raised by its shares.
  #area(points, pod, base) {
    const parts = [];
    let top = [], bottom = [], end = -Infinity;
    const close = () => {
      if (top.length) parts.push(`M${[...top, ...bottom.reverse()].join('L')}Z`);
      [top, bottom] = [[], []];
    };
    points.forEach((point, i) => {
      const share = point.shares[pod] || 0;
      const [left, right] = [this.x(Math.max(end, point.at - point.step)), this.x(point.at)];
      if (!share || point.at - point.step > end + 2) close();
      if (share) {
        const [from, to] = [this.y(base[i]).toFixed(1), this.y(base[i] + share).toFixed(1)];
        top.push(`${left.toFixed(1)},${to}`, `${right.toFixed(1)},${to}`);
        bottom.push(`${left.toFixed(1)},${from}`, `${right.toFixed(1)},${from}`);
        base[i] += share;
      }
      end = point.at;
    });
    close();
    return parts.join('');
  }

  // Newest first: where two are close together, only the newer one gets a label.
  #marks(points, width) {
    const marks = [];
    let free = width - RIGHT;
    for (let i = points.length - 1; i > 0; i -= 1) {
      if (points[i - 1].policy === points[i].policy) continue;
      const [at, name] = [this.x(points[i].at - points[i].step), points[i].policy];
      marks.push(svg('line', { x1: at, x2: at, y1: this.y(1), y2: this.y(0) }));
      const left = Math.min(at, width - RIGHT - 7 * name.length);
      if (left + 7 * name.length > free) continue;
      marks.push(svg('text', { x: left, y: this.y(1) - 5 }, name));
      free = left;
    }
    this.#layers[2].replaceChildren(...marks);
  }

  #cursor(points, colours, width) {
    const point = this.#at === null ? null : nearest(points, this.#at);
    this.tip.hidden = !point;
    this.#layers[3].replaceChildren();
    if (!point) return;
    const x = this.x(point.at - point.step / 2);
    this.#layers[3].append(svg('line', { x1: x, x2: x, y1: this.y(1), y2: this.y(0) }));
    const shares = Object.entries(point.shares).sort((a, b) => b[1] - a[1]);
    const rows = shares.slice(0, ROWS).map(([pod, share]) => {
      const row = html('div', '');
      const swatch = html('i', '', 'swatch');
      swatch.style.background = colours.of(pod);
      row.append(swatch, html('span', pod || 'other pods', 'text'), html('b', percent(share)));
      return row;
    });
    if (shares.length > ROWS) rows.push(html('div', `and ${shares.length - ROWS} more`));
    this.tip.replaceChildren(html('div', `${clock(point.at)} · ${percent(total(point))} · ${point.policy}`), ...rows);
    this.tip.style.left = `${Math.max(0, Math.min(x + 10, width - this.tip.offsetWidth))}px`;
  }

  #hover(x) {
    const [, span, now] = this.#shown || [[], 0, 0];
    const width = this.chart.clientWidth - LEFT - RIGHT;
    this.#move(now - span * (1 - (x - LEFT) / width));
  }

  #key(event) {
    const [points, , now] = this.#shown || [[], 0, 0];
    const at = points.indexOf(nearest(points, this.#at ?? now));
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15 }[event.key];
    if (event.key === 'Escape') return this.#leave();
    if (!step || at < 0) return undefined;
    event.preventDefault();
    return this.#move(points[Math.max(0, Math.min(points.length - 1, at + step))].at);
  }

  #move(at) {
    this.#at = at;
    if (this.#shown) this.draw(...this.#shown);
  }

  #leave() { this.#move(null); }
}

const nearest = (points, at) => points.reduce((best, each) =>
  !best || Math.abs(each.at - at) < Math.abs(best.at - at) ? each : best, null);

// A line of all pods' share for the overview, in a box of 100 by 30.
export function spark(path, points, span, now) {
  let end = -Infinity;
  path.setAttribute('d', points.map(point => {
    const [from, to] = [point.at - point.step, point.at].map(at => (100 * (1 - Math.min(1, (now - at) / span))).toFixed(1));
    const y = (29 - 28 * total(point)).toFixed(1);
    const part = point.at - point.step > end + 2 ? `M${from},${y}L${to},${y}` : `L${to},${y}`;
    end = point.at;
    return part;
  }).join(''));
}

// What a screen reader says of a timeline.
export function spoken(chart, gpu, pods, span) {
  const now = pods.filter(pod => pod.share).map(pod => `${pod.pod} ${percent(pod.share)}`).join(', ');
  const label = `Shares of pGPU ${gpu} over ${span / 60} minutes. Now: ${now || 'nobody'}. Arrow keys move the cursor.`;
  if (chart.getAttribute('aria-label') !== label) chart.setAttribute('aria-label', label);
}
