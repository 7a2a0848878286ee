// The timeline of one pGPU: pods' shares stacked over up to five minutes, with what changed marked.

const SPANS_S = [60, 120, 300];
const LEFT = 46, RIGHT = 8, TOP = 14, BOTTOM = 20;

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function draw(canvas, moments, gpu, colours, hover) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext('2d');
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const now = moments.length ? moments[moments.length - 1].at : 0;
  const age = moments.length ? now - moments[0].at : 0;
  const span = SPANS_S.find(each => age <= each) || SPANS_S[SPANS_S.length - 1];
  const x = at => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / span);
  const y = share => TOP + (height - TOP - BOTTOM) * (1 - share);
  grid(pen, width, x, y, now, span);
  const seen = moments.filter(moment => moment.at >= now - span);
  stack(pen, seen, gpu, colours, x, y);
  marks(pen, seen, gpu, x, y, width);
  if (hover !== null) tip(pen, seen, gpu, colours, x, y, hover, width);
}

function grid(pen, width, x, y, now, span) {
  pen.font = '11px system-ui, sans-serif';
  pen.fillStyle = css('--soft');
  pen.strokeStyle = css('--line');
  pen.lineWidth = 1;
  pen.textBaseline = 'middle';
  pen.textAlign = 'right';
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    pen.beginPath();
    pen.moveTo(LEFT, Math.round(y(share)) + 0.5);
    pen.lineTo(width - RIGHT, Math.round(y(share)) + 0.5);
    pen.stroke();
    pen.fillText(`${share * 100} %`, LEFT - 6, y(share));
  }
  pen.textBaseline = 'top';
  pen.textAlign = 'center';
  for (let ago = 0; ago <= span; ago += span / 5) {
    pen.textAlign = ago === 0 ? 'right' : ago === span ? 'left' : 'center';
    const text = ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
    pen.fillText(ago ? text : 'now', x(now - ago), y(0) + 6);
  }
}

function stack(pen, moments, gpu, colours, x, y) {
  const base = new Map();
  for (const [pod, colour] of colours) {
    const points = moments.map(moment => {
      const found = moment.pods.find(each => each.gpu === gpu && each.pod === pod);
      const from = base.get(moment.at) || 0;
      const to = from + (found ? found.share : 0);
      base.set(moment.at, to);
      return [moment.at, from, to];
    });
    if (!points.some(([, from, to]) => to > from)) continue;
    pen.beginPath();
    points.forEach(([at, , to], i) => (i ? pen.lineTo : pen.moveTo).call(pen, x(at), y(Math.min(1, to))));
    points.reverse().forEach(([at, from]) => pen.lineTo(x(at), y(Math.min(1, from))));
    pen.closePath();
    pen.fillStyle = colour;
    pen.globalAlpha = 0.82;
    pen.fill();
    pen.globalAlpha = 1;
  }
}

// From the newest on, so that where two are close together the newer one is named.
function marks(pen, moments, gpu, x, y, width) {
  const policy = moment => (moment.gpus.find(each => each.index === gpu) || {}).policy;
  let free = width;
  pen.textBaseline = 'bottom';
  pen.textAlign = 'left';
  for (let i = moments.length - 1; i > 0; i -= 1) {
    const [before, after, at] = [policy(moments[i - 1]), policy(moments[i]), x(moments[i].at)];
    if (!before || !after || before === after) continue;
    pen.strokeStyle = pen.fillStyle = css('--ink');
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(at, y(1));
    pen.lineTo(at, y(0));
    pen.stroke();
    pen.setLineDash([]);
    const long = pen.measureText(after).width + 6;
    const left = Math.min(at, width - long);
    if (left + long <= free) {
      pen.fillText(after, left, y(1) - 1);
      free = left;
    }
  }
}

function tip(pen, moments, gpu, colours, x, y, hover, width) {
  const nearest = moments.reduce((best, each) =>
    !best || Math.abs(x(each.at) - hover) < Math.abs(x(best.at) - hover) ? each : best, null);
  if (!nearest || Math.abs(x(nearest.at) - hover) > 12) return;
  const rows = nearest.pods.filter(each => each.gpu === gpu).map(each => [each.pod, each.share]);
  const lines = [[new Date(nearest.at * 1000).toLocaleTimeString(), null], ...rows];
  const wide = Math.max(...lines.map(([name]) => pen.measureText(name).width)) + 74;
  const left = x(nearest.at) + 10 + wide > width ? x(nearest.at) - wide - 10 : x(nearest.at) + 10;
  pen.strokeStyle = css('--ink');
  pen.beginPath();
  pen.moveTo(x(nearest.at), y(1));
  pen.lineTo(x(nearest.at), y(0));
  pen.stroke();
  pen.fillStyle = css('--card');
  pen.strokeStyle = css('--line');
  pen.beginPath();
  pen.roundRect(left, y(1) + 4, wide, lines.length * 16 + 10, 6);
  pen.fill();
  pen.stroke();
  pen.textBaseline = 'top';
  lines.forEach(([name, share], i) => {
    const top = y(1) + 10 + i * 16;
    pen.textAlign = 'left';
    if (share !== null) {
      pen.fillStyle = colours.get(name);
      pen.fillRect(left + 8, top + 2, 8, 8);
    }
    pen.fillStyle = css('--ink');
    pen.fillText(name, left + (share === null ? 8 : 22), top);
    pen.textAlign = 'right';
    if (share !== null) pen.fillText(`${(share * 100).toFixed(1)} %`, left + wide - 8, top);
  });
}
