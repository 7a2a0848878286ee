// Numbers as text, names in the order that people expect, and a colour for each pod.

export const COLOURS = 20;

const NARROW = '\u202f'; // a narrow space that does not break

export const percent = (share, digits = 1) => `${(share * 100).toFixed(digits).replace(/^100\.0$/, '100')}${NARROW}%`;

export function bytes(size) {
  let unit = 0;
  while (size >= 1024 && unit < 4) { size /= 1024; unit += 1; }
  const digits = size >= 100 || Number.isInteger(size) ? 0 : 1;
  return `${size.toFixed(digits)}${NARROW}${['B', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}`;
}

export function duration(ns) {
  const ms = ns / 1e6;
  return ms >= 1000 ? `${+(ms / 1000).toFixed(1)}${NARROW}s` : `${+ms.toFixed(ms < 10 ? 2 : 0)}${NARROW}ms`;
}

// A fact that moves to the next line as one.
export const whole = text => text.replaceAll(' ', '\u00a0');

export const clock = at => new Date(at * 1000).toLocaleTimeString();

const names = new Intl.Collator(undefined, { numeric: true });

// Online pods first; pod-2 before pod-10.
export const inOrder = pods => [...pods].sort((a, b) =>
  (a.class !== 'online') - (b.class !== 'online') || names.compare(a.pod, b.pod));

// A pod has the same colour on every pGPU while it lives. When it has ended, another pod may get its colour.
export class Colours {
  #of = new Map();

  update(pods) {
    const living = new Set(inOrder(pods).map(pod => pod.pod));
    for (const name of this.#of.keys()) if (!living.has(name)) this.#of.delete(name);
    for (const name of living) if (!this.#of.has(name)) this.#of.set(name, this.#rarest());
  }

  of(name) { return this.#of.has(name) ? `var(--c${this.#of.get(name)})` : 'var(--gone)'; }

  #rarest() {
    const uses = new Array(COLOURS).fill(0);
    for (const colour of this.#of.values()) uses[colour] += 1;
    return uses.indexOf(Math.min(...uses));
  }
}

// Change an element's text only if it differs, so that selected text stays selected.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function tell(element, text) {
  element.hidden = !text;
  put(element, text);
}
