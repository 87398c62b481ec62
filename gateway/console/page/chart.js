/* global uPlot */
// Lines over turns or over time. A table or a sentence beside each chart has the same figures in words.

import { html, useEffect, useRef } from "./htm-preact.js";
import { clock, day } from "./words.js";

const HEIGHT = 200;
const AXIS_SIZE = 62;

// `lines`: [{ label, values, colour, dash }], one value for each of `x`; null is a gap. `x`: turns from 1, or Unix seconds
// with `time`: "local", or "utc" for whole days. `format(value)` and `tick(value, most)` write a value; `most`: top of the scale; `least`: its least top.
export function Chart(props) {
  const { told, x, lines } = props;
  const [box, shown, plot] = [useRef(null), useRef(props), useRef(null)];
  shown.current = props;
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(optionsFor(box.current, shown.current), dataOf(shown.current), box.current);
    };
    draw();
    const watch = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    watch.observe(box.current);
    dark.addEventListener("change", draw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", draw);
      plot.current.destroy();
    };
  }, [lines.length]);
  useEffect(() => plot.current.setData(dataOf(props)), [JSON.stringify([x, lines])]);
  return html`<div class="chart" role="img" aria-label=${told} ref=${box}></div>`;
}

const dataOf = ({ x, lines }) => [x, ...lines.map((line) => line.values)];

// The x axis: turns from 1, times of the day, or days.
const SAID = {
  turns: { label: "Turn", incrs: [1, 2, 5, 10, 20], text: (turn) => (Number.isInteger(turn) ? turn : ""), range: (_, low, high) => [0.5, Math.max(high, 4) + 0.5] },
  local: { label: "Time", incrs: [15, 30, 60, 120, 300, 600], text: (seconds) => clock(seconds * 1000), range: (_, low, high) => [Math.min(low, high - 60), high] },
  utc: { label: "Day", incrs: [1, 2, 7, 14].map((days) => days * 86_400), text: day, range: (_, low, high) => [low, high] },
};

function optionsFor(box, { lines, time, format, tick, most, least = 0 }) {
  const style = getComputedStyle(box);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const said = SAID[time ?? "turns"];
  return {
    width: box.clientWidth,
    height: HEIGHT,
    padding: [null, 28, null, null], // half of the last label
    cursor: { points: { size: 9 }, drag: { x: false, y: false } },
    tzDate: (seconds) => (time === "utc" ? uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC") : new Date(seconds * 1000)),
    scales: {
      x: { time: Boolean(time), range: said.range },
      y: { range: (_, low, high) => [0, most ?? Math.max(high * 1.1, least)] },
    },
    axes: [
      { ...axis, size: 28, label: said.label, labelSize: 20, labelFont: axis.font, space: 70, incrs: said.incrs, values: (_, at) => at.map(said.text) },
      { ...axis, size: AXIS_SIZE, values: (_, at) => at.map((value) => tick(value, at.at(-1))) },
    ],
    series: [
      { label: said.label, value: (_, at) => (at == null ? "" : said.text(at)) },
      ...lines.map(({ label, colour: name, dash }) => ({
        label, dash, stroke: colour(name), width: 2, spanGaps: time !== "utc", points: { show: time !== "local", size: 6, fill: colour(name) },
        value: (_, value) => (value == null ? "" : format(value)),
      })),
    ],
  };
}
