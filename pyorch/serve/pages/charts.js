// Draws lines over time and the map of experts, in the colours of live.css.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const MOST_SCALE = 2; // a finer screen shows no more of squares, and large models have many

// Gives a canvas the screen's resolution; returns its context and its size in CSS pixels.
function fit(canvas, width, height) {
  const scale = Math.min(MOST_SCALE, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// points: [seconds, value or null], oldest first; span: seconds to show; most: the top of the scale, or null; unit: formats
// a value.
export function drawLine(canvas, points, span, most, unit) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const context = fit(canvas, width, height);
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

const N_SHADES = 33; // of one colour, by how often an expert was used
const TALLEST = 18, WIDEST = 26; // pixels of a cell
const LEAST = { mouse: [4, 7], touch: [7, 10] }; // width and height of a cell that can still be seen or touched

// The map of experts. Rows are layers. A pixel of a small picture is an expert, and the picture is drawn enlarged: so a
// model of 15,000 experts costs a canvas, not 15,000 rectangles or elements.
export class ExpertMap {
  // labels: another canvas, left of it, for the numbers of layers; both are in an element that scrolls.
  constructor(canvas, labels) {
    this.canvas = canvas;
    this.labels = labels;
    this.picture = document.createElement("canvas");
    this.layers = [];
    this.cursor = null; // [row, expert]
  }

  // layers: {states, heat}, heat 0 to 1 of each expert
  draw(layers) {
    this.layers = layers;
    const widest = Math.max(1, ...layers.map((layer) => layer.states.length));
    const [least, lowest] = LEAST[matchMedia("(pointer: coarse)").matches ? "touch" : "mouse"];
    const room = this.canvas.parentElement.clientWidth - this.labels.clientWidth;
    this.size = Math.max(least, Math.min(WIDEST, Math.floor(room / widest))); // whole pixels: squares have sharp edges
    this.row = Math.max(lowest, Math.min(TALLEST, this.size));
    this.top = Math.max(0, (12 - this.row) / 2); // half of the first and the last label is outside its row
    const [width, height] = [widest * this.size, Math.ceil(layers.length * this.row + 2 * this.top)];
    for (const [canvas, wide] of [[this.canvas, width], [this.labels, this.labels.clientWidth]]) {
      if (canvas === this.canvas) canvas.style.width = `${wide}px`;
      canvas.style.height = `${height}px`;
    }
    const context = fit(this.canvas, width, height);
    if (!layers.length) return;
    const pins = this.paint(layers, widest);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, 0, this.top, width, layers.length * this.row);
    context.fillStyle = colour("--card");
    for (let r = 1; r <= layers.length; r++) context.fillRect(0, this.top + r * this.row - 1, width, 1);
    for (let e = 1; this.size > 5 && e <= widest; e++) context.fillRect(e * this.size - 1, 0, 1, height);
    context.fillStyle = colour("--ink");
    const dot = Math.min(3, this.size - 1);
    for (const [r, e] of pins) {
      context.fillRect((e + 0.5) * this.size - dot / 2 - 0.5, this.top + (r + 0.5) * this.row - dot / 2 - 0.5, dot, dot);
    }
    if (this.cursor) {
      const [r, e] = this.cursor;
      context.strokeStyle = colour("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(e * this.size - 0.75, this.top + r * this.row - 0.75, this.size + 0.5, this.row + 0.5);
    }
    this.drawLabels(height);
  }

  // Paints the small picture. Returns the cells of pinned experts.
  paint(layers, widest) {
    const [absent, loading, cold, hot, deviceCold, deviceHot] =
      ["--absent", "--loading", "--cold", "--hot", "--device-cold", "--device-hot"].map((name) => rgb(colour(name)));
    const shades = (from, to) => Array.from({ length: N_SHADES }, (_, i) =>
      pixel(from.map((c, j) => Math.round(c + ((to[j] - c) * i) / (N_SHADES - 1)))));
    const [host, device] = [shades(cold, hot), shades(deviceCold, deviceHot)];
    const others = [pixel(absent), pixel(loading)];
    const [width, height] = [widest, layers.length];
    if (this.picture.width !== width || this.picture.height !== height) Object.assign(this.picture, { width, height });
    const context = this.picture.getContext("2d");
    const image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const pins = [];
    layers.forEach(({ states, heat }, r) => {
      for (let e = 0; e < states.length; e++) {
        const state = parseInt(states[e], 32);
        const byUse = state & ON_DEVICE ? device : state & RESIDENT ? host : null;
        pixels[r * width + e] = byUse ? byUse[Math.round(heat[e] * (N_SHADES - 1))] : others[state & LOADING ? 1 : 0];
        if (state & PINNED) pins.push([r, e]);
      }
    });
    context.putImageData(image, 0, 0);
    return pins;
  }

  drawLabels(height) {
    const context = fit(this.labels, this.labels.clientWidth, height);
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = colour("--soft");
    const step = Math.ceil(10 / this.row);
    for (let r = 0; r < this.layers.length; r += step) {
      context.fillText(this.layers[r].layer, 0, this.top + (r + 0.5) * this.row);
    }
  }

  // Returns the cell at a point of the page, null outside the map.
  at(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const e = Math.floor((clientX - box.left) / this.size);
    const r = Math.floor((clientY - box.top - this.top) / this.row);
    return this.layers[r] && e >= 0 && e < this.layers[r].states.length ? [r, e] : null;
  }

  // Moves the cursor by a key; returns whether it is a key of the map.
  move(key) {
    if (!this.layers.length) return false;
    const [r, e] = this.cursor ?? [0, 0];
    const end = this.layers[r].states.length - 1;
    const to = {
      ArrowLeft: [r, e - 1], ArrowRight: [r, e + 1], ArrowUp: [r - 1, e], ArrowDown: [r + 1, e], Home: [r, 0], End: [r, end],
    }[key];
    if (!to) return false;
    const row = Math.max(0, Math.min(this.layers.length - 1, to[0]));
    this.cursor = this.cursor ? [row, Math.max(0, Math.min(this.layers[row].states.length - 1, to[1]))] : [0, 0];
    this.reveal();
    return true;
  }

  // Scrolls so that the cursor is visible.
  reveal() {
    const [r, e] = this.cursor;
    const scroller = this.canvas.parentElement;
    const [left, room] = [e * this.size, scroller.clientWidth - this.labels.clientWidth];
    if (left < scroller.scrollLeft) scroller.scrollLeft = left;
    if (left + this.size > scroller.scrollLeft + room) scroller.scrollLeft = left + this.size - room;
    const y = this.canvas.getBoundingClientRect().top + this.top + r * this.row;
    if (y < 0 || y + this.row > innerHeight - EDGE) scrollBy(0, y - innerHeight / 2);
  }
}

const EDGE = 40; // pixels at the foot of the window, where the text of the cursor's cell sticks

const LITTLE = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

// Returns the pixel of a colour, for an ImageData that is seen as an array of 32 bits.
function pixel([red, green, blue]) {
  const bytes = LITTLE ? [red, green, blue, 255] : [255, blue, green, red];
  return bytes.reduce((value, byte, i) => value + byte * 256 ** i, 0);
}
