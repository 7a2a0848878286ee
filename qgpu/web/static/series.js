// What a timeline shows: the daemon's coarse hour, and the seconds since the page's server began to look.

const AVERAGED_S = 15;
const LONGEST_STEP_S = 3;

// Points of one pGPU, oldest first: {at, step, policy, shares}. A point covers the `step` seconds before `at`.
export function points(past, moments, gpu, span, now) {
  const seconds = [];
  let before = null;
  for (const moment of moments) {
    const card = moment.gpus.find(each => each.index === gpu);
    if (card) {
      const step = before === null ? 1 : Math.min(LONGEST_STEP_S, moment.at - before);
      const shares = {};
      for (const pod of moment.pods) if (pod.gpu === gpu && pod.share) shares[pod.pod] = pod.share;
      seconds.push({ at: moment.at, step, policy: card.policy, shares });
    }
    before = moment.at;
  }
  const coarse = past ? past.points.map(point => ({ ...point, step: past.step_s })) : [];
  const fine = span <= 300;
  const border = fine
    ? (seconds.length ? seconds[0].at - seconds[0].step : Infinity)
    : (coarse.length ? coarse[coarse.length - 1].at : -Infinity);
  return [
    ...coarse.filter(point => point.at <= border + 1),
    ...(fine ? seconds : averaged(seconds.filter(point => point.at > border + 1))),
  ].filter(point => point.at > now - span);
}

function averaged(seconds) {
  const found = [];
  for (let first = 0; first < seconds.length;) {
    const until = seconds[first].at + AVERAGED_S;
    let last = first;
    while (last + 1 < seconds.length && seconds[last + 1].at < until) last += 1;
    const all = seconds.slice(first, last + 1);
    const step = all.reduce((sum, point) => sum + point.step, 0);
    const shares = {};
    for (const point of all)
      for (const [pod, share] of Object.entries(point.shares)) shares[pod] = (shares[pod] || 0) + share * point.step / step;
    found.push({ at: seconds[last].at, step, policy: seconds[last].policy, shares });
    first = last + 1;
  }
  return found;
}

export const total = point => Math.min(1, Object.values(point.shares).reduce((sum, share) => sum + share, 0));
