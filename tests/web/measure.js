// What a test asks of the page: contrasts as WCAG 2 defines them, of what is really drawn.

function rgba(text) {
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  pen.fillStyle = text;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}

function luminance([r, g, b]) {
  const [x, y, z] = [r, g, b].map(v => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function paper(element) {
  for (let each = element; each; each = each.parentElement) {
    const colour = rgba(getComputedStyle(each).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
}

// The text with the least contrast, and that contrast.
function leastContrast() {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let least = [99, ''];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.getClientRects().length) continue;
    if (element.closest('.unseen, template')) continue;
    const style = getComputedStyle(element);
    const found = contrast(rgba(element.namespaceURI.endsWith('svg') ? style.fill : style.color), paper(element));
    if (found < least[0]) least = [found, walker.currentNode.textContent];
  }
  return least;
}

// Of each swatch: its colour, and its contrast to what it lies on.
function swatches() {
  return [...document.querySelectorAll('tbody .swatch')].map(each => {
    const colour = rgba(getComputedStyle(each).backgroundColor);
    return [colour.join(), contrast(colour, paper(each.parentElement))];
  });
}

function names() {
  return [...document.querySelectorAll('.gpu')].map(gpu => [...gpu.querySelectorAll('.name .text')].map(each => each.textContent));
}

// Cells that are drawn and wider inside than outside.
function tooWide() {
  return [...document.querySelectorAll('tbody th, tbody td')]
    .filter(each => each.getClientRects().length && each.scrollWidth > each.clientWidth)
    .map(each => `${each.className}: ${each.textContent.trim()}`);
}

// Where each line of the names begins that take several.
function namesLines() {
  return [...document.querySelectorAll('.name .text')].map(text => {
    const range = document.createRange();
    range.selectNodeContents(text);
    return [...range.getClientRects()].map(each => Math.round(each.left));
  }).filter(lines => lines.length > 1);
}
