// Two uPlot charts that follow the theme and the width of their boxes.

const HEIGHT = 210;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(format) {
  return {
    stroke: () => colour("--faint"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    // Given as undefined, these would hide uPlot's own, which label the times.
    ...(format && { values: (_, ticks) => ticks.map(format), size: 62 }),
  };
}

// A chart in `box` of lines `[{label, colour, format}]`; `draw(data)` shows `[times, ...values]`.
export function chart(box, lines, range) {
  const { format } = lines[0];
  let plot = null;

  function make(data) {
    box.replaceChildren();
    plot = new uPlot(
      {
        width: box.clientWidth,
        height: HEIGHT,
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range } },
        axes: [axis(), axis(format)],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.label,
            stroke: () => colour(line.colour),
            width: 2,
            spanGaps: true,
            points: { show: data[0].length < 40 },
            value: (_, value) => (value == null ? "–" : line.format(value)),
          })),
        ],
      },
      data,
      box,
    );
  }

  new ResizeObserver(() => plot?.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);

  return {
    draw(data, summary) {
      box.setAttribute("aria-label", summary);
      if (data[0].length === 0) {
        plot?.destroy();
        plot = null;
        box.innerHTML = '<p class="empty">No request has ended yet.</p>';
      } else if (plot === null) {
        make(data);
      } else {
        plot.setData(data);
      }
    },
    redraw() {
      plot?.redraw();
    },
  };
}
