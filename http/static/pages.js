// The picture of the pool: a square for each page, or for some pages in a row.

const LARGEST = 26;

const NAMES = ["--used", "--shared", "--cached", "--free"];

function colours() {
  const style = getComputedStyle(document.documentElement);
  return NAMES.map((name) => channels(style.getPropertyValue(name).trim()));
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// The largest squares with which all fit.
function layout(width, height, count) {
  let size = LARGEST;
  while (size > 3 && Math.floor(width / size) * Math.floor(height / size) < count) size -= 0.5;
  return { size, columns: Math.max(Math.floor(width / size), 1) };
}

function blend(palette, weights, total) {
  const mixed = [0, 1, 2].map((channel) =>
    weights.reduce((sum, weight, i) => sum + (weight / total) * palette[i][channel], 0));
  return `rgb(${mixed.map(Math.round).join(" ")})`;
}

export function drawPages(canvas, { per_cell: perCell, cells }, numPages) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const { size, columns } = layout(width, height, cells.length);
  const palette = colours();
  const side = size - (size > 14 ? 3 : size > 6 ? 1.5 : 1);
  cells.forEach(([used, shared, cached], i) => {
    const total = Math.min(perCell, numPages - i * perCell);
    const weights = [used, shared, cached, total - used - shared - cached];
    context.fillStyle = blend(palette, weights, total);
    context.beginPath();
    const [x, y] = [(i % columns) * size, Math.floor(i / columns) * size];
    context.roundRect(x, y, side, side, size > 14 ? 4 : size > 8 ? 2 : 1);
    context.fill();
  });
}
