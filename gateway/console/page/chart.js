/* global uPlot */
// The time to the first token of every turn beside the cold one. The table below it has the same figures in words.

import { html, useEffect, useRef } from "./htm-preact.js";
import { milliseconds, tick } from "./words.js";

const HEIGHT = 220;

export function Chart({ turns }) {
  const box = useRef(null);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let plot = null;
    const draw = () => {
      plot?.destroy();
      plot = new uPlot(optionsFor(box.current, turns.length), dataOf(turns), box.current);
    };
    draw();
    const watch = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    watch.observe(box.current);
    dark.addEventListener("change", draw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", draw);
      plot.destroy();
    };
  }, [turns.length, turns.at(-1)?.at, turns.at(-1)?.coldMs]);
  const last = turns.at(-1);
  const told = `Time to the first token of ${turns.length} turns; the last took ${milliseconds(last?.ttftMs)}, cold ${milliseconds(last?.coldMs)}.`;
  return html`<div class="chart" role="img" aria-label=${told} ref=${box}></div>`;
}

const dataOf = (turns) => [
  turns.map((_, index) => index + 1),
  turns.map((turn) => turn.ttftMs),
  turns.map((turn) => turn.coldMs ?? (turn.kind === "create" ? turn.ttftMs : null)),
];

function optionsFor(box, number) {
  const style = getComputedStyle(box);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const line = (label, stroke, dash) => ({
    label, stroke, dash, width: 2, spanGaps: true, points: { show: true, size: 7, fill: stroke },
    value: (_, ms) => (ms == null ? "" : milliseconds(ms)),
  });
  return {
    width: box.clientWidth,
    height: HEIGHT,
    cursor: { points: { size: 9 }, drag: { x: false, y: false } },
    scales: { x: { time: false, range: [0.5, Math.max(number, 4) + 0.5] }, y: { range: (_, low, high) => [0, (high || 1) * 1.1] } },
    axes: [
      { ...axis, incrs: [1, 2, 5, 10, 20], values: (_, at) => at.map((turn) => (Number.isInteger(turn) ? turn : "")) },
      { ...axis, size: 62, values: (_, at) => at.map((ms) => tick(ms, at.at(-1))) },
    ],
    series: [
      { label: "Turn", value: (_, turn) => turn ?? "" },
      line("With the context", colour("--cached")),
      line("Cold", colour("--computed"), [5, 4]),
    ],
  };
}
