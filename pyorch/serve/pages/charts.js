// Draws lines over time and the map of experts, in the colours of live.css.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Gives a canvas the screen's resolution; returns its context and its size in CSS pixels.
function fit(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const tall = height ?? canvas.clientHeight;
  if (height !== undefined) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

// points: [seconds, value or null], oldest first; span: seconds to show; most: the top of the scale, or null; unit: formats
// a value.
export function drawLine(canvas, points, span, most, unit) {
  const { context, width, height } = fit(canvas);
  const known = points.filter(([, value]) => value !== null);
  const top = most ?? Math.max(...known.map(([, value]) => value), 1e-9);
  const end = points.length ? points[points.length - 1][0] : 0;
  const x = (t) => width - 1 - ((end - t) / span) * (width - 2);
  const y = (value) => height - 2 - Math.min(1, value / top) * (height - 5 - LABEL);
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  context.strokeRect(0, height - 0.5, width, 0);
  if (known.length) {
    context.fillStyle = colour("--soft");
    context.font = FONT;
    context.textBaseline = "top";
    context.fillText(unit(top), 0, 0);
  }
  context.strokeStyle = colour("--accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let drawing = false;
  for (const [t, value] of points) {
    if (value === null) { drawing = false; continue; }
    drawing ? context.lineTo(x(t), y(value)) : context.moveTo(x(t), y(value));
    drawing = true;
  }
  context.stroke();
}

const LABEL = 12; // pixels for the top of a scale, above its line
const FONT = "10px ui-sans-serif, sans-serif";

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

export const RESIDENT = 1, LOADING = 2, PINNED = 4, IN_USE = 8, ON_DEVICE = 16;

// The map of experts. Rows are layers.
export class ExpertMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.layers = [];
    this.cursor = null; // [row, expert]
  }

  // layers: {states, heat}, heat 0 to 1 of each expert
  draw(layers) {
    this.layers = layers;
    const widest = Math.max(1, ...layers.map((layer) => layer.states.length));
    const label = 26;
    this.left = label;
    this.size = Math.min(26, (this.canvas.clientWidth - label) / widest);
    this.row = Math.max(7, Math.min(18, this.size));
    this.top = Math.max(0, (12 - this.row) / 2); // half of the first and the last label is outside its row
    const { context } = fit(this.canvas, Math.ceil(layers.length * this.row + 2 * this.top));
    const gap = this.size > 5 ? 1 : 0;
    const [absent, loading, ink] = ["--absent", "--loading", "--ink"].map(colour);
    const [host, device] = [["--cold", "--hot"], ["--device-cold", "--device-hot"]].map((names) => {
      const [cold, hot] = names.map((name) => rgb(colour(name)));
      return Array.from({ length: 33 }, (_, i) => `rgb(${cold.map((c, j) => Math.round(c + ((hot[j] - c) * i) / 32))})`);
    });
    context.font = FONT;
    context.textBaseline = "middle";
    layers.forEach((layer, r) => {
      const y = this.top + r * this.row;
      if (this.row >= 10 || r % 2 === 0) {
        context.fillStyle = colour("--soft");
        context.fillText(layer.layer, 0, y + this.row / 2);
      }
      for (let e = 0; e < layer.states.length; e++) {
        const state = parseInt(layer.states[e], 32);
        const x = this.left + e * this.size;
        const shades = state & ON_DEVICE ? device : state & RESIDENT ? host : null;
        context.fillStyle = shades ? shades[Math.round(layer.heat[e] * 32)] : state & LOADING ? loading : absent;
        context.fillRect(x, y, this.size - gap, this.row - 1);
        if (state & PINNED) {
          context.fillStyle = ink;
          context.fillRect(x + this.size / 2 - 1.5, y + this.row / 2 - 2, 3, 3);
        }
      }
    });
    if (this.cursor) {
      const [r, e] = this.cursor;
      context.strokeStyle = ink;
      context.lineWidth = 1.5;
      context.strokeRect(this.left + e * this.size - 1, this.top + r * this.row - 1, this.size + 1, this.row + 1);
    }
  }

  // Returns the cell at a point of the page, null outside the map.
  at(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const e = Math.floor((clientX - box.left - this.left) / this.size);
    const r = Math.floor((clientY - box.top - this.top) / this.row);
    return this.layers[r] && e >= 0 && e < this.layers[r].states.length ? [r, e] : null;
  }

  move(key) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    if (!step || !this.layers.length) return false;
    const [r, e] = this.cursor ?? [0, 0];
    const row = Math.max(0, Math.min(this.layers.length - 1, r + (this.cursor ? step[0] : 0)));
    const most = this.layers[row].states.length - 1;
    this.cursor = [row, Math.max(0, Math.min(most, e + (this.cursor ? step[1] : 0)))];
    return true;
  }
}
